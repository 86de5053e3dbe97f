"""Classes of models by name, for `TransformersModel`: the registry of the engine, as a mapping."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, ClassVar

from mindspeed_mm.fsdp.utils.register import model_register


class RegisteredModels(MutableMapping[str, Any]):
    """`model_register` as a dict: to set an item is to register a class, which `model_id` then names."""

    def __getitem__(self, name: str) -> Any:
        if name not in model_register:
            raise KeyError(name)
        return model_register.get(name)

    def __setitem__(self, name: str, model_class: Any) -> None:
        model_register.register(name)(model_class)

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"'{name}' stays registered: runs refer to classes by their names")

    def __iter__(self) -> Iterator[str]:
        return iter(model_register.names())

    def __len__(self) -> int:
        return len(model_register.names())


class ProviderModelHub:
    """Finds the class of a model."""

    MODEL_MAPPINGS: ClassVar[MutableMapping[str, Any]] = RegisteredModels()
    """Name → class. `ModelHub.MODEL_MAPPINGS["name"] = Class` is enough for `model_id: name`."""

    @staticmethod
    def build(config: Any, transformer_config: Any = None) -> Any:
        """The class of a model: by `config.model_id`, else by the first of its folder's `architectures`, else by its
        `model_type`.

        Args:
            config: The model's section of model.json.
            transformer_config: The folder's configuration, of transformers.

        Raises:
            ValueError: None of them is registered.
        """
        tried = [getattr(config, "model_id", None)]
        if transformer_config is not None:
            tried += [*(getattr(transformer_config, "architectures", None) or ())[:1]]
            tried += [getattr(transformer_config, "model_type", None)]
        for name in filter(None, tried):
            if name in ProviderModelHub.MODEL_MAPPINGS:
                return ProviderModelHub.MODEL_MAPPINGS[name]
        known = ", ".join(ProviderModelHub.MODEL_MAPPINGS)
        raise ValueError(f"no class is registered for {', '.join(map(str, filter(None, tried)))}; known: {known}")


ModelHub = ProviderModelHub
"""The name that users' code imports; the engine's own class of that name builds models."""
