"""Module patterns of files that were written for another implementation of a model, in the names that it has here."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_mm.fsdp.params.cards import module_names
from mindspeed_mm.fsdp.params.schema_walk import pattern_keys
from mindspeed_mm.fsdp.params.yaml.tree import Node, find, text_at, value_at_key

MULTI_TOKEN = "mtp"
"""Module of the heads that predict further tokens."""
HEAD = "features.chunkloss_plan.apply_module"
"""One name, no pattern."""


def settle_module_names(root: Node) -> None:
    """Bring the module patterns of a configuration to the names of its model's card; changes the tree in place.

    Files name the heads that predict further tokens also where `model.mtp_num_layers` leaves them out: so does this.
    """
    names = module_names().get(text_at(root, "model.model_id") or "", {})
    has_heads = bool(value_at_key(root, "model.mtp_num_layers"))
    for key in (*pattern_keys(), HEAD):
        entry = find(root, key)
        if entry is None:
            continue
        if isinstance(entry.node.value, list) and not has_heads:
            entry.node.value = [node for node in entry.node.value if not _names_heads(node.value)]
        for node in entry.node.value if isinstance(entry.node.value, list) else [entry.node]:
            if isinstance(node.value, str):
                node.value = _renamed(node.value, names)


def _names_heads(pattern: object) -> bool:
    return isinstance(pattern, str) and pattern.partition(".")[0] == MULTI_TOKEN


def _renamed(pattern: str, names: Mapping[str, str]) -> str:
    """A pattern with the longest known name that it begins with replaced."""
    for name in sorted(names, key=len, reverse=True):
        if pattern == name or pattern.startswith(f"{name}."):
            return names[name] + pattern.removeprefix(name)
    return pattern
