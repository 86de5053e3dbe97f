"""A section of model.json that describes one component of a generator (`ae`, `text_encoder`, `predictor`), read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.core.errors import ConfigError, ModelFolderError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.core.terminal import say
from mindspeed_mm.fsdp.utils.dtypes import TORCH_DTYPES

_DTYPES = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float64": "fp64"}
"""Other names of types in model.json → ours."""


def section_of(config: object) -> JsonObject:
    """A section as a dict of one's own: of a mapping, or of anything with `to_dict()`.

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if not hasattr(config, "to_dict"):
        way_out = "Pass the component's section of model.json."
        raise ConfigError(f"{config!r:.80} is not a section of model.json", way_out=way_out)
    return dict(config.to_dict())


def needed(section: Mapping[str, object], key: str, name: str) -> Any:
    """The value of a key. Raises `ConfigError` where it is not given."""
    if section.get(key) is None:
        raise ConfigError("is not given", key=f"{name}.{key}", way_out="Add it to model.json.")
    return section[key]


def folder_of(section: Mapping[str, object], name: str) -> Path:
    """The folder that `from_pretrained` names.

    Raises:
        ConfigError: It names none.
        ModelFolderError: It is not there.
    """
    folder = Path(str(needed(section, "from_pretrained", name)))
    if not folder.is_dir():
        way_out = f"Relative paths start at '{Path.cwd()}'."
        raise ModelFolderError(
            "is a file, not a folder" if folder.exists() else "does not exist",
            where=str(folder),
            key=f"{name}.from_pretrained",
            way_out=way_out,
        )
    return folder


def dtype_of(section: Mapping[str, object], name: str) -> torch.dtype | None:
    """The type that `dtype` names; None where it is not given: as the weights are stored.

    Raises:
        ConfigError: It names none.
    """
    said = section.get("dtype")
    if said is None or isinstance(said, torch.dtype):
        return said
    found = TORCH_DTYPES.get(_DTYPES.get(str(said), str(said)))
    if found is None:
        way_out = f"Write one of {', '.join((*TORCH_DTYPES, *_DTYPES))}."
        raise ConfigError(f"'{said}' is not a type of weights", key=f"{name}.dtype", way_out=way_out)
    return found


def note_unread(section: JsonMapping, read: Collection[str], name: str) -> None:
    """Report keys that are given and have no effect."""
    unread = sorted(key for key, value in section.items() if key not in read and value is not None)
    if unread:
        say(f"note: {name} of model.json: {', '.join(unread)}: no effect here", err=True)
