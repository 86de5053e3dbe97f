"""Registries of models, datasets and the smaller parts that a plugin may bring.

A built-in entry lives in its own folder and is imported when it is first asked for; an outside plugin registers itself
when `training.plugin` names its package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.params.cards import dataset_modules, model_modules
from mindspeed_mm.fsdp.utils.plugins import import_plugin
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

__all__ = ["Registry", "data_register", "import_plugin", "model_register"]

Entry = TypeVar("Entry")


class Registry:
    """Names → classes or functions of one kind.

    Args:
        kind: The configuration key whose value is looked up here, for messages (`model.model_id`).
        builtin: Gives id → module that registers it; asked, and the module imported, on first use.
        advice: What an unknown name may do instead, a full sentence.
    """

    def __init__(self, kind: str, builtin: Callable[[], Mapping[str, str]] = dict, advice: str = "") -> None:
        self.kind, self._advice = kind, advice
        self._find_builtin = builtin
        self._entries: JsonObject = {}
        self._config_keys: dict[str, JsonMapping] = {}

    def register(self, name: str, *, keys: Mapping[str, object] | None = None) -> Callable[[Entry], Entry]:
        """Decorator that files a class or function under `name`.

        Args:
            name: The id that a YAML uses.
            keys: Extra configuration keys of this entry, key → default value (the value's type is the key's type;
                `None` takes anything). They become legal in the entry's section of the YAML.

        Raises:
            ConfigError: Another object holds the name already.
        """

        def add(entry: Entry) -> Entry:
            held = self._entries.get(name)
            if held is not None and _origin(held) != _origin(entry):
                raise ConfigError(
                    f"'{name}' is registered twice: by {_origin(held)} and by {_origin(entry)}",
                    key=self.kind,
                    way_out=f"Choose another id. Known: {', '.join(self.names())}.",
                )
            self._entries[name] = entry
            self._config_keys[name] = dict(keys or {})
            return entry

        return add

    @property
    def _builtin(self) -> Mapping[str, str]:
        return self._find_builtin()

    def get(self, name: str) -> Any:
        """The entry of this name.

        Raises:
            ConfigError: Nothing is registered under the name; the message lists what is.
        """
        if name not in self._entries and name in self._builtin:
            # Many entries import transformers at their top, whose models of pictures import torchvision: built for
            # another torch, as it may be, it fails there, and transformers then says that PreTrainedModel is missing.
            prepare_for_transformers()
            importlib.import_module(self._builtin[name])
        if name not in self._entries:
            raise ConfigError(
                f"'{name}' is not registered",
                key=self.kind,
                way_out=f"{did_you_mean(name, self.names())}{self._advice}Registered: {', '.join(self.names())}. "
                "A plugin's package must be listed in training.plugin.",
            )
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._builtin

    def loaded(self) -> JsonMapping:
        """What is registered by now: the built-in entries that were asked for, and everything of imported plugins."""
        return dict(self._entries)

    def names(self) -> list[str]:
        """Every name known, built-in ones included."""
        return sorted({*self._entries, *self._builtin})

    def config_keys(self, name: str) -> JsonMapping:
        """The extra configuration keys that an outside entry declared with its registration."""
        return self._config_keys.get(name, {})


def _origin(entry: object) -> str:
    return f"{getattr(entry, '__module__', '?')}.{getattr(entry, '__qualname__', entry)}"


model_register = Registry("model.model_id", builtin=model_modules)
data_register = Registry("data.dataset_param.dataset_type", builtin=dataset_modules)
