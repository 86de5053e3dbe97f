"""`section.key=value` on the command line, put over the file's tree."""

from __future__ import annotations

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.fsdp.params.key_renames import Notes
from mindspeed_mm.fsdp.params.value_types import show
from mindspeed_mm.fsdp.params.yaml_parser import parse_yaml
from mindspeed_mm.fsdp.params.yaml_tree import Entry, Node, Place, clone, merge, nest, plain

COMMAND_LINE = "command line"
"""The place of everything that an override holds."""


def parse_override(override: str, notes: Notes) -> Node | None:
    """A tree with the one key of an override; None, and a problem in `notes`, when it is malformed."""
    key, sign, value = override.partition("=")
    names = key.strip().split(".")
    if not sign or not all(names) or override.startswith("-"):
        message = f"'{override}' is not section.key=value"
        hint = "Overrides take no dashes." if override.startswith("-") else "Example: training.lr=2e-5."
        notes.problems.append(Problem(message, COMMAND_LINE, way_out=hint))
        return None
    try:
        node = clone(parse_yaml(value, COMMAND_LINE).root)
    except ConfigError as error:
        notes.problems.append(Problem(error.problems[0].what, COMMAND_LINE, key, error.problems[0].way_out))
        return None
    _stamp(node)
    return nest(".".join(names), Entry(Place(COMMAND_LINE), node))


def _stamp(node: Node) -> None:
    """Places inside a one-line override say nothing: the whole came from the command line."""
    node.place = Place(COMMAND_LINE)
    children = node.value.values() if isinstance(node.value, dict) else []
    for entry in children:
        entry.key = Place(COMMAND_LINE)
        _stamp(entry.node)
    for item in node.value if isinstance(node.value, list) else []:
        _stamp(item)


def put_over(root: Node, extra: Node, notes: Notes) -> None:
    """Merge an override, unless it goes through a value that holds no keys."""
    here, there, key = root, extra, []
    while isinstance(there.value, dict) and len(there.value) == 1:
        name, entry = next(iter(there.value.items()))
        key.append(name)
        held = here.value.get(name)
        if held is None or held.node.value is None:
            break
        if isinstance(entry.node.value, dict) and not isinstance(held.node.value, dict):
            what = f"has no keys below it: it is {show(plain(held.node))} at {held.node.place}"
            notes.problems.append(Problem(what, COMMAND_LINE, ".".join(key)))
            return
        if not isinstance(held.node.value, dict):
            break
        here, there = held.node, entry.node
    merge(root, extra)
