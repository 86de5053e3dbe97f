"""Train multimodal models from one YAML. Importing this loads nothing heavy: a name is loaded when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.core.version import __version__

if TYPE_CHECKING:
    from mindspeed_mm.api import check, evaluate, export, infer, load_run, train
    from mindspeed_mm.fsdp.train.train_engine import Hook
    from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

_HOMES = dict.fromkeys(("train", "check", "infer", "evaluate", "export", "load_run"), "mindspeed_mm.api")
_HOMES["Hook"] = "mindspeed_mm.fsdp.train.train_engine"
_HOMES["ensure_torchvision"] = "mindspeed_mm.fsdp.utils.torchvision_guard"

__all__ = [
    "Hook",
    "MMError",
    "__version__",
    "check",
    "ensure_torchvision",
    "evaluate",
    "export",
    "infer",
    "load_run",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
