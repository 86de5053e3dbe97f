"""Classes of models by name, for `TransformersModel`: the registry of the engine, as a mapping."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, ClassVar

from mindspeed_mm.fsdp.utils.register import model_register


class RegisteredModels(MutableMapping[str, type]):
    """`model_register` as a dict: to set an item is to register a class, which `model_id` then names."""

    def __getitem__(self, name: str) -> type:
        if name not in model_register:
            raise KeyError(name)
        found: type = model_register.get(name)
        return found

    def __setitem__(self, name: str, model_class: type) -> None:
        model_register.register(name)(model_class)

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"'{name}' stays registered: runs refer to classes by their names")

    def __iter__(self) -> Iterator[str]:
        return iter(model_register.names())

    def __len__(self) -> int:
        return len(model_register.names())


class ProviderModelHub:
    """Finds the class of a model."""

    MODEL_MAPPINGS: ClassVar[MutableMapping[str, type]] = RegisteredModels()
    """Name → class. `ModelHub.MODEL_MAPPINGS["name"] = Class` is enough for `model_id: name`."""

    @staticmethod
    def build(config: object, transformer_config: object = None) -> type:
        """The class of a model: by `config.model_id`, else by the first of its folder's `architectures`, else by its
        `model_type`.

        Args:
            config: The model's section of model.json.
            transformer_config: The folder's configuration, of transformers.

        Raises:
            ValueError: None of them is registered.
        """
        architectures = _said(transformer_config, "architectures") or [None]
        tried = [_said(config, "model_id"), architectures[0], _said(transformer_config, "model_type")]
        names = [name for name in tried if name]
        for name in names:
            if name in ProviderModelHub.MODEL_MAPPINGS:
                return ProviderModelHub.MODEL_MAPPINGS[name]
        known = ", ".join(ProviderModelHub.MODEL_MAPPINGS)
        raise ValueError(f"no class is registered for {', '.join(map(str, names))}; known: {known}")


def _said(config: object, key: str) -> Any:
    """What a configuration says, or None: it need not have every key."""
    return getattr(config, key, None)


ModelHub = ProviderModelHub
"""The name that users' code imports; the engine's own class of that name builds models."""
