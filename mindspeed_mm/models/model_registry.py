"""Classes of models by id, under the names of MindSpeed-LLM's FSDP2 backend (`model_registry.py`)."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import ClassVar

from mindspeed_mm.models.common.modelzoo import RegisteredModels


class ModelRegistry:
    """The registry that `model.model_id` is looked up in."""

    _REGISTRY: ClassVar[MutableMapping[str, type]] = RegisteredModels()
    """Id → class. `ModelRegistry._REGISTRY["name"] = Class` is enough for `model_id: name`."""

    @classmethod
    def register(cls, name: str, model_class: type) -> None:
        """Make a class the model of an id. Raises `ConfigError` where another class has it."""
        cls._REGISTRY[name] = model_class

    @classmethod
    def get_model_class(cls, name: str) -> type:
        """The class of an id. Raises `KeyError` where nothing is registered under it."""
        return cls._REGISTRY[name]
