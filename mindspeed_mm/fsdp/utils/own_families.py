"""Lets transformers find the model families that are written here, when a folder needs one."""

from __future__ import annotations

import importlib
from pathlib import Path

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.fsdp.params.cards import own_model_types


def know_family_of(folder: Path) -> None:
    """Register configuration, model and processor with transformers' Auto classes, where a folder's config.json names a
    model type of ours. May be called again; a folder without a readable config.json is left to whoever reads it."""
    path = folder / "config.json"
    if not path.is_file():
        return
    try:
        model_type = read_json_object(path, ModelFolderError).get("model_type")
    except ModelFolderError:
        return
    if isinstance(model_type, str) and (module := own_model_types().get(model_type)):
        importlib.import_module(module).tell_transformers()  # by name: models stand above this room
