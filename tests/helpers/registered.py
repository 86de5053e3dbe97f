"""What plugins from outside the package have registered in this process."""

from __future__ import annotations

import sys
from typing import Any

_REGISTRIES = {
    "mindspeed_mm.fsdp.utils.register": ("model_register", "data_register"),
    "mindspeed_mm.fsdp.data.data_utils.data_collator": ("DATA_COLLATOR",),
    "mindspeed_mm.fsdp.data.data_utils.mm_plugin": ("MM_PLUGINS",),
    "mindspeed_mm.fsdp.data.data_utils.template": ("TEMPLATES",),
    "mindspeed_mm.fsdp.posttrain_rewards.registry": ("reward_register",),
}


def registered_outside() -> set[str]:
    """`registry.name` of every entry that is not the package's; nothing of registries that nobody imported yet."""
    found = set()
    for module, registries in _REGISTRIES.items():
        for registry in registries if module in sys.modules else ():
            entries = getattr(sys.modules[module], registry)._entries
            found |= {f"{registry}.{name}" for name, entry in entries.items() if not _is_own(entry)}
    return found


def _is_own(entry: Any) -> bool:
    made_by = entry if hasattr(entry, "__qualname__") else type(entry)
    return str(made_by.__module__).startswith("mindspeed_mm.")
