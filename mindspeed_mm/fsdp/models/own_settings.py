"""Settings that a plugin puts from the YAML into a folder's configuration (`overwrite_transformer_config`): a folder
that is written keeps them, because who loads it has no YAML."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

_PLAIN = (bool, int, float, str, list, type(None))


@dataclass(frozen=True)
class OwnSettings:
    """What a plugin has changed of its folder's configuration, as config.json nests it."""

    values: dict[str, Any]


def as_written(config: object) -> dict[str, Any]:
    """The settings of a configuration as they are now, sections as mappings."""
    told = attribute_at(config, "to_dict")
    return copy.deepcopy(told() if callable(told) else vars(config))


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that differ, sections included; those that JSON cannot hold are left out."""
    found: dict[str, Any] = {}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, Mapping):
            section = changed(old if isinstance(old, Mapping) else {}, value)
            if section:
                found[key] = section
        elif isinstance(value, _PLAIN) and (key not in before or value != old):
            found[key] = value
    return found


def write_own_settings(model: nn.Module, folder: Path) -> None:
    """Put them into the config.json of a folder that is being written.

    Args:
        model: Whole, from `ModelHub.build`.
        folder: Has a config.json.
    """
    own = facts_of(model).noted(OwnSettings)
    if own is None:
        return
    path = folder / "config.json"
    config = _merged(read_json_object(path, ModelFolderError), own.values)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def note_on_settings(model: nn.Module) -> tuple[str, ...]:
    """What whoever loads adapters alone should know: no configuration lies beside them."""
    own = facts_of(model).noted(OwnSettings)
    if own is None:
        return ()
    told = json.dumps(own.values, ensure_ascii=False)
    return (f"trained with {told}: set that in config.json of the base, or write the whole model with --merge",)


def _merged(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    whole = dict(config)
    for key, value in values.items():
        old = whole.get(key)
        whole[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return whole
