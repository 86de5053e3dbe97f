"""Names in a model with adapters. PEFT puts a layer's own weights one level down and the adapter's beside them:

    layers.0.q_proj.weight  →  layers.0.q_proj.base_layer.weight
                               layers.0.q_proj.lora_A.default.weight, layers.0.q_proj.lora_B.default.weight

Folders of weights know the names on the left only; checkpoints of such a run hold what is trained, under the names on
the right.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

ADAPTER = "default"
"""PEFT's name of the adapter."""
_BASE = ".base_layer."
_ADAPTER_WEIGHT = re.compile(rf"(?P<layer>.+)\.lora_(?P<side>[AB])\.{ADAPTER}\.weight")


@dataclass(frozen=True)
class LoraReport:
    """The adapters of a model; it is kept on the model as `_mm_lora`."""

    rank: int
    alpha: float
    dropout: float
    initialisation: bool | str
    targets: tuple[str, ...]
    """Names of the linear layers that have one."""
    peft_targets: tuple[str, ...] | str
    """The same for PEFT: ends of names that only those layers have, or a regular expression."""
    modules_to_save: tuple[str, ...] = ()
    """Names of the modules that are trained whole."""
    trained: frozenset[str] = frozenset()
    """Names of the parameters and persistent buffers that differ from the base model's: what a checkpoint holds."""
    parameters: int = 0
    """Numbers that are trained."""

    @property
    def scale(self) -> float:
        """What B·A is multiplied by."""
        return self.alpha / self.rank

    def __str__(self) -> str:
        whole = f", {', '.join(self.modules_to_save)} whole" if self.modules_to_save else ""
        return f"rank {self.rank}, alpha {self.alpha:g} on {len(self.targets)} linear layers{whole}"


def lora_of(model: nn.Module) -> LoraReport | None:
    """The adapters that `apply_lora` gave a model, sharded or not; None when it has none."""
    found: Any = getattr(model, "_mm_lora", None)
    return found


def base_name(name: str) -> str:
    """The name that a parameter has in the model without adapters."""
    return name.replace(_BASE, ".")


def naming_of(model: nn.Module) -> Callable[[str], str]:
    """What turns the names of a model's parameters into those that a folder of its weights has."""
    return base_name if lora_of(model) is not None else str


def is_adapter_weight(name: str) -> bool:
    """Whether a parameter is an adapter's own."""
    return _ADAPTER_WEIGHT.fullmatch(name) is not None


def split_adapter_weight(name: str) -> tuple[str, str] | None:
    """(layer, `A` or `B`) of an adapter's parameter; None for any other."""
    match = _ADAPTER_WEIGHT.fullmatch(name)
    return (match["layer"], match["side"]) if match else None


def adapter_weight(layer: str, side: str) -> str:
    """The name of an adapter's parameter: the way back of `split_adapter_weight`."""
    return f"{layer}.lora_{side}.{ADAPTER}.weight"
