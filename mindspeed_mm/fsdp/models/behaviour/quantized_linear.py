"""Frozen linear layers whose weight is kept in 4 or 8 bits (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

The parameter keeps its name and becomes bytes, a row of them for each row of the weight: the codes, then their scales.
Sharding cuts rows, and casts no bytes. A forward pass makes the weight anew in what it computes in, and so does the
backward pass: nothing but bytes is kept. The arithmetic is plain torch and runs on every device.

nf4     two codes a byte, one fp32 scale for 64 inputs: 0.5625 bytes a number; codes are quantiles of a normal
        distribution (appendix E), as bitsandbytes and torchao have them, without quantising the scales again
int8    one code a byte, one fp32 scale a row: 1 byte a number; symmetric, the largest number of a row is 127
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.core.patterns import is_inside
from mindspeed_mm.fsdp.models.lora.names import base_name
from mindspeed_mm.fsdp.models.structure.spec import find_blocks
from mindspeed_mm.fsdp.ops.forward_stack import ForwardKind, replace_forward
from mindspeed_mm.fsdp.utils.model_parts import shared_parameters

KEY = "training.lora.quantize"
_NEEDS_TORCH = "2.13"
BLOCK = 64
"""Inputs that share a scale in nf4."""
_SMALLEST_BLOCK = 8
_SCALE_BYTES = 4
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The sixteen numbers that codes stand for, times the scale."""


@dataclass(frozen=True)
class QuantizedLayout:
    """How a weight (outputs, inputs) lies in bytes (outputs, `row_bytes`)."""

    kind: str
    """`nf4` or `int8`."""
    inputs: int
    block: int
    """Inputs that share a scale."""

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's codes."""
        if self.kind == "nf4":
            return self.inputs // 2
        return self.inputs

    @property
    def row_bytes(self) -> int:
        """Bytes that hold one row of the weight: its codes, then its scales."""
        return self.code_bytes + self.inputs // self.block * _SCALE_BYTES

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Rows of a weight → rows of bytes."""
        blocks = weight.float().reshape(len(weight), -1, self.block)
        largest = blocks.abs().amax(dim=-1, keepdim=True)
        scaled = (blocks / torch.where(largest > 0, largest, 1.0)).flatten(1)
        if self.kind == "nf4":
            codes = torch.bucketize(scaled, _code_borders(weight.device)).to(torch.uint8)
            codes, scale = (codes[:, ::2] << 4) | codes[:, 1::2], largest
        else:
            codes, scale = (scaled * 127).round().to(torch.int8).view(torch.uint8), largest / 127
        return torch.cat([codes, scale.flatten(1).contiguous().view(torch.uint8)], dim=1)

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of bytes → rows of the weight that they stand for."""
        codes, scale = packed[:, : self.code_bytes], packed[:, self.code_bytes :].contiguous().view(torch.float32)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if self.kind == "nf4":
            values = F.embedding(codes.int(), _pairs(packed.device))  # a byte is two numbers
        else:
            values = codes.contiguous().view(torch.int8).to(torch.float32)
        blocks = values.reshape(len(packed), -1, self.block).to(wide)
        return (blocks * scale[:, :, None].to(wide)).flatten(1).to(dtype)


@cache
def _code_borders(device: torch.device) -> torch.Tensor:
    """Half way between neighbouring codes."""
    values = torch.tensor(_NF4, dtype=torch.float64)
    return ((values[1:] + values[:-1]) / 2).to(torch.float32).to(device)


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """Byte → the two numbers that it stands for, the first in the upper half."""
    values = torch.tensor(_NF4)
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1).to(device)


class _Linear(torch.autograd.Function):
    """x·Wᵀ + b, keeping bytes for the backward pass."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        inputs: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        packing: QuantizedLayout,
    ) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.packing = packing
        return F.linear(inputs, packing.unpack(packed, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> Any:
        (packed,) = ctx.saved_tensors
        return gradient @ ctx.packing.unpack(packed, gradient.dtype), None, None, None


class QuantizedForward:
    """The forward of a linear layer whose weight is bytes."""

    def __init__(self, layer: nn.Linear, packing: QuantizedLayout) -> None:
        self._layer, self.packing = layer, packing

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute the linear layer from its packed weight, (…, inputs) → (…, outputs)."""
        packed = self._layer.weight
        if packed.dtype == torch.int8:
            packed = packed.view(torch.uint8)
        return _Linear.apply(inputs, packed, self._layer.bias, self.packing)


def quantize_linears(model: nn.Module, kind: str) -> list[str]:
    """Let the frozen linear layers of a model's blocks keep their weight in bytes; loading fills them. Embeddings, the
    head, norms, and what is trained or shared stay as they are.

    Args:
        model: With adapters, parameters on meta.
        kind: `nf4` or `int8`.

    Returns:
        Names of the layers, as in the model without adapters.

    Raises:
        ConfigError: There is none.
    """
    shared = set(chain.from_iterable(shared_parameters(model)))
    blocks = find_blocks(model)
    names = []
    for name, module in model.named_modules():
        inside = is_inside(name, blocks, strict=True)
        if not inside or type(module) is not nn.Linear or module.weight.requires_grad:
            continue
        packing = _packing(kind, module.in_features)
        if packing is None or f"{name}.weight" in shared:
            continue
        empty = torch.empty(module.out_features, packing.row_bytes, dtype=torch.uint8, device=module.weight.device)
        module._parameters["weight"] = nn.Parameter(empty, requires_grad=False)
        replace_forward(module, ForwardKind.QUANTIZED, QuantizedForward(module, packing))
        names.append(base_name(f"{name}.weight").removesuffix(".weight"))
    if not names:
        raise ConfigError(
            f"'{kind}', and the model's blocks have no frozen linear layer", key=KEY, way_out="Leave it out."
        )
    return names


@torch.no_grad()
def pack_linears(model: nn.Module, kind: str) -> None:
    """Keep the weights of the linear layers of a frozen encoder in bytes from now on; shared ones stay as they are. The
    bytes are int8, the one type that T5 does not cast its hidden states to.

    Args:
        model: With its weights, on one device.
        kind: `nf4` or `int8`.
    """
    shared = set(chain.from_iterable(shared_parameters(model)))
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or f"{name}.weight" in shared:
            continue
        packing = _packing(kind, module.in_features)
        if packing is not None:
            packed = packing.pack(module.weight).view(torch.int8)
            module._parameters["weight"] = nn.Parameter(packed, requires_grad=False)
            replace_forward(module, ForwardKind.QUANTIZED, QuantizedForward(module, packing))


def packings_of(model: nn.Module) -> dict[str, QuantizedLayout]:
    """Name of a weight that is kept in bytes, as in the model without adapters → how."""
    packings = {}
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if isinstance(forward, QuantizedForward):
            packings[base_name(f"{name}.weight")] = forward.packing
    return packings


def can_shard_bytes() -> bool:
    """Whether the installed torch shards bytes beside numbers: before 2.13 `fully_shard` asks them for gradients."""
    return torch.__version__ >= _NEEDS_TORCH


def check_sharded_bytes(model: nn.Module) -> None:
    """Raise `MachineError` when a model that is to be sharded has bytes, and the installed torch cannot do it."""
    if packings_of(model) and not can_shard_bytes():
        raise MachineError(
            f"sharding the bytes of quantised layers needs torch {_NEEDS_TORCH}, and {torch.__version__} is installed",
            key=KEY,
            way_out="Leave it out, or train on one device in fp32; or install a newer torch.",
        )


def rounded(weight: torch.Tensor, packing: QuantizedLayout) -> torch.Tensor:
    """The weight that is computed with when this one is kept in bytes."""
    return packing.unpack(packing.pack(weight), weight.dtype)


def _packing(kind: str, inputs: int) -> QuantizedLayout | None:
    """None for a layer whose inputs do not make blocks of some size."""
    if kind == "int8":
        return QuantizedLayout(kind, inputs, inputs)
    block = math.gcd(inputs, BLOCK)
    if block >= _SMALLEST_BLOCK:
        return QuantizedLayout(kind, inputs, block)
    return None
