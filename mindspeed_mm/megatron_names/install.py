"""Puts modules under the names of libraries that are not installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from mindspeed_mm.fsdp.utils.device import let_cuda_mean_this_device

_HERE = "mindspeed_mm.megatron_names"
NAMES: dict[str, str] = {
    "mindspeed.megatron_adaptor": f"{_HERE}.adaptor",
    "megatron.training": f"{_HERE}.training",
    "megatron.training.utils": f"{_HERE}.training",
    "megatron.training.global_vars": f"{_HERE}.training",
    "megatron.training.arguments": f"{_HERE}.training",
    "megatron.core.mpu": f"{_HERE}.mpu",
    "megatron.core.parallel_state": f"{_HERE}.mpu",
    "megatron.core.enums": f"{_HERE}.enums",
    "megatron.core.num_microbatches_calculator": f"{_HERE}.micro_batches",
    "mindspeed_llm.fsdp2.model_registry": "mindspeed_mm.models.model_registry",
}
"""Module that a script imports → the module that stands for it."""


def install() -> list[str]:
    """Make the names importable where their library is not installed.

    Returns:
        Libraries that are stood for.
    """
    missing = [name for name in dict.fromkeys(name.partition(".")[0] for name in NAMES) if _is_missing(name)]
    for name, source in NAMES.items():
        if name.partition(".")[0] in missing:
            _put(name, importlib.import_module(source))
    if "mindspeed" in missing:  # its adaptor lets scripts that speak of CUDA mean the accelerator at hand
        let_cuda_mean_this_device()
    return missing


def _is_missing(name: str) -> bool:
    return name not in sys.modules and importlib.util.find_spec(name) is None


def _put(name: str, source: ModuleType) -> None:
    """The module under a name, and packages around it."""
    parent, _, last = name.rpartition(".")
    module = ModuleType(name, source.__doc__)
    module.__dict__.update({key: value for key, value in vars(source).items() if not key.startswith("_")})
    module.__path__ = []  # a package too: `megatron.training` holds `megatron.training.utils`
    sys.modules[name] = module
    if parent and parent not in sys.modules:
        _put(parent, ModuleType(parent))
    if parent:
        setattr(sys.modules[parent], last, module)
