"""Names in a model with adapters. PEFT puts a layer's own weights one level down and the adapter's beside them:

    layers.0.q_proj.weight          →  layers.0.q_proj.base_layer.weight
                                       layers.0.q_proj.lora_A.default.weight, layers.0.q_proj.lora_B.default.weight
                                       layers.0.q_proj.lora_magnitude_vector.default.weight    (DoRA)
    layers.0.experts.gate_up_proj   →  layers.0.experts.base_layer.base_layer.gate_up_proj     (one level a parameter)
                                       layers.0.experts.base_layer.lora_A.default.weight, …
    layers.0.experts.down_proj      →  layers.0.experts.base_layer.base_layer.down_proj
                                       layers.0.experts.lora_A.default.weight, …

Folders of weights know the names on the left only; checkpoints of such a run hold what is trained, under the names on
the right. The adapter that is trained is called `default`, those that lie frozen under it `frozen_0`, `frozen_1`, …
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from mindspeed_mm.fsdp.models.facts import facts_of

ADAPTER = "default"
"""PEFT's name of the adapter that is trained."""
INITIAL = ("initial_A", "initial_B")
"""Buffers of a layer whose base weight gave away what the adapter started with: the adapter as it started."""
MAGNITUDE = "magnitude_vector"
"""DoRA's length of each row of the weight."""
_BASE = re.compile(r"(\.base_layer)+\.")
_ADAPTER_WEIGHT = re.compile(
    rf"(?P<layer>.+)\.(?:lora_(?P<side>A|B|{MAGNITUDE})\.(?P<adapter>\w+)\.weight|(?P<initial>{'|'.join(INITIAL)}))"
)


class AdaptedLinear(Protocol):
    """A linear layer with adapters, as PEFT makes it."""

    base_layer: nn.Linear
    lora_A: Mapping[str, nn.Linear]
    lora_B: Mapping[str, nn.Linear]
    lora_magnitude_vector: Mapping[str, nn.Module]
    r: Mapping[str, int]
    lora_alpha: Mapping[str, float]
    scaling: Mapping[str, float]

    def get_buffer(self, target: str) -> torch.Tensor:
        """Return a buffer by its dotted name, as `nn.Module` does."""
        ...

    def register_buffer(self, name: str, tensor: torch.Tensor) -> None:
        """Add a named buffer to the layer, as `nn.Module` does."""
        ...


@dataclass(frozen=True)
class Strength:
    """What one layer's adapter is made with."""

    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        """What B·A is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class LoraReport:
    """The adapters of a model: `facts_of(model).lora`."""

    rank: int
    alpha: float
    dropout: float
    initialisation: bool | str
    targets: tuple[str, ...]
    """Names of the linear layers that have one."""
    peft_targets: tuple[str, ...] | str
    """The same for PEFT: ends of names that only those layers have, or a regular expression."""
    parameters_targeted: tuple[str, ...] = ()
    """Names of the fused parameters of experts that have one, without PEFT's levels."""
    peft_parameters: tuple[str, ...] = ()
    """The same for PEFT: ends of names."""
    strengths: dict[str, Strength] = field(default_factory=dict)
    """Ends of names of fused parameters whose adapters have another rank and alpha."""
    use_dora: bool = False
    modules_to_save: tuple[str, ...] = ()
    """Names of the modules that are trained whole."""
    frozen: tuple[str, ...] = ()
    """Folders of the adapters that lie frozen under the trained one, in the order of their names in the model."""
    quantize: str | None = None
    """How the linear layers of the frozen base are kept."""
    token_rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Weight of an embedding or output head → its rows of new tokens. Only these rows of it are trained, in full."""
    trained: frozenset[str] = frozenset()
    """Names of the parameters and persistent buffers that differ from the base model's: what a checkpoint holds."""
    parameters: int = 0
    """Numbers that are trained."""

    @property
    def scale(self) -> float:
        """What B·A is multiplied by, but for `strengths`."""
        return self.alpha / self.rank

    @property
    def moves_base(self) -> bool:
        """Whether base weights gave away what the adapters started with."""
        return moves_base(self.initialisation)

    def __str__(self) -> str:
        kind = "DoRA " if self.use_dora else ""
        on = []
        if self.targets:
            on.append(f"{len(self.targets)} linear layers")
        if self.parameters_targeted:
            on.append(f"{len(self.parameters_targeted)} parameters of experts")
        described = f"{kind}rank {self.rank}, alpha {self.alpha:g} on {' and '.join(on)}"
        if self.modules_to_save:
            described += f", {', '.join(self.modules_to_save)} whole"
        if self.token_rows:
            described += f", {len(next(iter(self.token_rows.values())))} new tokens in full"
        if self.frozen:
            described += f", over {len(self.frozen)} frozen"
        if self.quantize:
            described += f", base in {self.quantize}"
        return described


def moves_base(initialisation: bool | str) -> bool:
    """Whether an initialisation takes what adapters start with out of the base weights: W = W' + scale · B·A."""
    return isinstance(initialisation, str) and initialisation.startswith(("pissa", "olora", "corda"))


def base_name(name: str) -> str:
    """The name that a parameter has in the model without adapters."""
    return _BASE.sub(".", name)


def naming_of(model: nn.Module) -> Callable[[str], str]:
    """What turns the names of a model's parameters into those that a folder of its weights has."""
    if facts_of(model).lora is not None:
        return base_name
    return str


def is_adapter_weight(name: str) -> bool:
    """Whether a parameter or buffer is an adapter's own, of whichever adapter."""
    return _ADAPTER_WEIGHT.fullmatch(name) is not None


def split_adapter_weight(name: str) -> tuple[str, str] | None:
    """(layer, `A`, `B` or `magnitude_vector`) of a parameter of the trained adapter; None for any other."""
    match = _ADAPTER_WEIGHT.fullmatch(name)
    if match is None or match["adapter"] != ADAPTER:
        return None
    return match["layer"], match["side"]


def adapter_weight(layer: str, side: str, adapter: str = ADAPTER) -> str:
    """The name of an adapter's parameter: the way back of `split_adapter_weight`."""
    return f"{layer}.lora_{side}.{adapter}.weight"


def initial_weights(layer: str) -> tuple[str, str]:
    """Names of the buffers that hold a layer's adapter as it started."""
    first, second = INITIAL
    return f"{layer}.{first}", f"{layer}.{second}"
