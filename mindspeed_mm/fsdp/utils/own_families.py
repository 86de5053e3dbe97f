"""Lets transformers find the model families that are written here, when a folder needs one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.fsdp.params.cards import own_model_types


def model_type_of(folder: Path) -> str | None:
    """The model type that a folder's config.json names; None where it has none, or is not readable, which whoever
    reads it says."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        model_type = read_json_object(path, ModelFolderError).get("model_type")
    except ModelFolderError:
        return None
    if isinstance(model_type, str):
        return model_type
    return None


def own_processor_of(folder: Path) -> Any:
    """The class of the processor of a family that is written here and whose files name another's; None for others. Call
    it behind `know_family_of`, which says what the installed transformers lacks."""
    for module in own_model_types().get(model_type_of(folder) or "", ()):
        try:
            family = importlib.import_module(module)
        except ImportError:
            continue
        processor = getattr(family, "PROCESSOR", None)
        if processor is not None:
            return processor
    return None


def know_family_of(folder: Path) -> None:
    """Register configuration, model and processor with transformers' Auto classes, where a folder's config.json names a
    model type of ours. May be called again; a folder without a readable config.json is left to whoever reads it.

    Raises:
        ModelFolderError: The installed transformers is older than the classes that the family is built on.
    """
    model_type = model_type_of(folder)
    modules = own_model_types().get(model_type or "", ())
    lacking: list[ImportError] = []
    for module in modules:
        try:
            family = importlib.import_module(module)  # by name: models stand above this room
        except ImportError as error:
            lacking.append(error)
        else:
            family.tell_transformers()
    if lacking and len(lacking) == len(modules):
        raise ModelFolderError(
            f"'{model_type}' models are built on classes that the installed transformers lacks: {lacking[0]}",
            where=str(folder / "config.json"),
            key="model_type",
            way_out="Install transformers 5.23 or later.",
        ) from lacking[0]
