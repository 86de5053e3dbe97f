"""Data for training: rows to batches. Importing this imports nothing heavy; the names are loaded when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.data.build import build_mm_dataloader, build_mm_dataset
    from mindspeed_mm.fsdp.data.data_utils.data_collator import DATA_COLLATOR, register_collator
    from mindspeed_mm.fsdp.data.data_utils.mm_plugin import register_mm_plugin
    from mindspeed_mm.fsdp.data.data_utils.template import register_template
    from mindspeed_mm.fsdp.data.dataloader.dataloader import MMDataLoader
    from mindspeed_mm.fsdp.data.dataloader.order import DataPosition
    from mindspeed_mm.fsdp.data.dataset import MMDataset

_HOMES = {
    "build_mm_dataset": "build",
    "build_mm_dataloader": "build",
    "MMDataset": "dataset",
    "MMDataLoader": "dataloader.dataloader",
    "DataPosition": "dataloader.order",
    "DATA_COLLATOR": "data_utils.data_collator",
    "register_collator": "data_utils.data_collator",
    "register_mm_plugin": "data_utils.mm_plugin",
    "register_template": "data_utils.template",
}

__all__ = [
    "build_mm_dataset",
    "build_mm_dataloader",
    "MMDataset",
    "MMDataLoader",
    "DataPosition",
    "DATA_COLLATOR",
    "register_collator",
    "register_mm_plugin",
    "register_template",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
