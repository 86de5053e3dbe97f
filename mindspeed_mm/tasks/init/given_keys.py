"""Keys that are given to `mm init` beside its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindspeed_mm.core.config_path import dotted
from mindspeed_mm.core.errors import ConfigError, UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.params.yaml.key_renames import Notes
from mindspeed_mm.fsdp.params.yaml.overrides import parse_override
from mindspeed_mm.fsdp.params.yaml.tree import plain

_AFTERWARDS = "Leave it out, and change it in the YAML afterwards: mm init chooses it by the forecast of memory."


_CHOSEN: dict[str, str] = {
    "model.model_name_or_path": "Give it as --model.",
    "data.dataset_param.basic_parameters.dataset": "Give it as --data.",
    "training.micro_batch_size": _AFTERWARDS,
    "training.gradient_accumulation_steps": _AFTERWARDS,
    "features.recompute": _AFTERWARDS,
    "training.lora": "Choose with --method full, lora or qlora, and change the rest in the YAML afterwards.",
}
"""Key, or section, that `mm init` sets → what to do instead of giving it."""


def given_keys(overrides: Sequence[str]) -> JsonObject:
    """Dotted key → value of each `section.key=value`; a section is taken apart.

    Raises:
        ConfigError: A word is no such assignment.
        UsageError: A key is one that `mm init` chooses itself.
    """
    notes, found = Notes(), dict[str, Any]()
    for word in overrides:
        node = parse_override(word, notes)
        if node is not None:
            found |= dict(_leaves(plain(node), ""))
    if notes.problems:
        raise ConfigError("the keys that are given", problems=notes.problems)
    for key in found:
        for chosen, way_out in _CHOSEN.items():
            if key == chosen or key.startswith(f"{chosen}."):
                raise UsageError("is set by mm init", key=key, way_out=way_out)
    return found


def _leaves(values: object, prefix: str) -> Iterator[tuple[str, object]]:
    if not isinstance(values, Mapping) or not values:
        yield prefix, values
        return
    for name, value in values.items():
        yield from _leaves(value, dotted(prefix, name))
