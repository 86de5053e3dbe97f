"""What tests leave in this process: entries of plugins from outside the package, and secrets that it hides."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from mindspeed_mm.core import redaction

_REGISTRIES = {
    "mindspeed_mm.fsdp.utils.register": ("model_register", "data_register"),
    "mindspeed_mm.fsdp.data.data_utils.data_collator": ("DATA_COLLATOR",),
    "mindspeed_mm.fsdp.data.data_utils.mm_plugin": ("MM_PLUGINS",),
    "mindspeed_mm.fsdp.data.data_utils.template": ("TEMPLATES",),
    "mindspeed_mm.fsdp.posttrain_rewards.registry": ("reward_register",),
}


@contextmanager
def forgetting() -> Iterator[None]:
    """Take out what was registered within the `with` block, and the modules that did it: imported again, they do it
    again. Secrets of that time are no longer hidden."""
    entries, modules, secrets = set(_registered_outside()), set(sys.modules), set(redaction._known)
    yield
    redaction._known &= secrets
    for (room, registry, name), entry in _registered_outside().items():
        if (room, registry, name) not in entries:
            getattr(sys.modules[room], registry)._entries.pop(name)
            getattr(sys.modules[room], registry)._config_keys.pop(name, None)
            _forget_modules(_made_in(entry), modules)


def _registered_outside() -> dict[tuple[str, str, str], Any]:
    """Module, registry and name of every entry that is not the package's; nothing of registries that nobody imported
    yet."""
    found = {}
    for room, registries in _REGISTRIES.items():
        for registry in registries if room in sys.modules else ():
            for name, entry in getattr(sys.modules[room], registry)._entries.items():
                if not _made_in(entry).startswith("mindspeed_mm."):
                    found[room, registry, name] = entry
    return found


def _made_in(entry: Any) -> str:
    return str((entry if hasattr(entry, "__qualname__") else type(entry)).__module__)


def _forget_modules(name: str, but: Collection[str]) -> None:
    package = name if name.startswith("tests.") else name.partition(".")[0]
    for module in {*sys.modules} - {*but}:
        if module == package or module.startswith(f"{package}."):
            del sys.modules[module]
