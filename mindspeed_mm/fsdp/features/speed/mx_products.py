"""Products of microscaled numbers by torchao, in linear layers and in fused experts: blocks of 32 along the dimension
that is summed over share a power of two, and each number is an e4m3 (OCP Microscaling Formats v1.0; Rouhani et al.
2023, arXiv:2310.10537).

S rows, G groups of them, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.ops.experts import taken, use_grouped_linear, use_own_experts
from mindspeed_mm.fsdp.ops.forward_stack import ForwardKind, replace_forward
from mindspeed_mm.fsdp.ops.grouped_matmul import with_bias
from mindspeed_mm.fsdp.ops.host_values import outside_graphs
from mindspeed_mm.fsdp.utils.model_parts import attribute_at
from mindspeed_mm.fsdp.utils.torchao_library import load_torchao

BLOCK = 32
"""Numbers that share a scale: the format's one size."""
GROUP_ROWS = 128
"""Rows that groups are filled up to: torchao's kernels want multiples of it, and sides of a weight that are such. A
multiple of the block, so that no block has rows of two groups."""
EMULATE = "emulate"
"""The setting of `extra_args` that does the same arithmetic without the device's instructions."""
SCALES = ("rceil", "floor")
"""How a block's power of two may be found: the least that leaves no number too large, or that of the format's text."""

Product = Callable[..., torch.Tensor]
Settings = Mapping[str, object]


class MxOptions(NamedTuple):
    """Kernels (the device's or emulated), how scales are found, and whether the gradient of a weight is a product of
    plain numbers: torchao's own values of the first two."""

    kernels: object
    scales: object
    exact_weight_gradient: bool

    @classmethod
    def of(cls, settings: Settings, *, key: str) -> MxOptions:
        """Those of checked `extra_args`; `key` is named where torchao lacks a part."""
        modes = load_torchao("prototype.mx_formats.config", key=key).ScaleCalculationMode
        kernels = load_torchao("quantization.quantize_.common.kernel_preference", key=key).KernelPreference
        chosen = kernels.EMULATED if settings.get(EMULATE) else kernels.AUTO
        mode = modes[str(settings.get("scale_calculation_mode", SCALES[0])).upper()]
        return cls(chosen, mode, bool(settings.get("wgrad_with_hp", False)))


def convert_linears(linears: Mapping[str, nn.Linear], settings: Settings, *, key: str) -> None:
    """Forward on the instance: torchao's own conversion replaces the parameters by tensors that lose the bias."""
    product = load_torchao("prototype.moe_training.mxfp8_linear", key=key)._to_mxfp8_then_scaled_mm
    options = MxOptions.of(settings, key=key)
    for module in linears.values():
        replace_forward(module, ForwardKind.LOW_PRECISION, MxForward(module, product, options))


def convert_experts(experts: Mapping[str, nn.Module], settings: Settings, *, key: str) -> None:
    """Let modules of `fused_experts` be computed by our implementation, with microscaled products.

    Raises:
        MachineError: torchao has no kernels for grouped products here.
    """
    part = "prototype.moe_training.mxfp8_grouped_mm"
    torchao = load_torchao(part, key=key)
    if not settings.get(EMULATE):
        quantizing = load_torchao("prototype.moe_training.kernels.mxfp8.quant", key=key)
        known = attribute_at(torchao, "_SM100_KERNELS_AVAILABLE", False)
        if not (known and attribute_at(quantizing, "_mxfp8_cutedsl_kernels_available", False)):
            raise MachineError(
                "torchao's kernels for grouped products are not here",
                key=key,
                way_out="They need compute capability 10.x, a torchao built for CUDA 12.8 or later, and `pip install "
                "nvidia-cutlass-dsl apache-tvm-ffi`; without quantize.moe.mx experts stay in the plan's type.",
            )
    product = MxGroupedLinear(torchao._to_mxfp8_then_scaled_grouped_mm, MxOptions.of(settings, key=key))
    for module in experts.values():
        use_own_experts(module)
        use_grouped_linear(module, product)


class MxForward:
    """The forward pass of a linear layer whose products are microscaled.

    Args:
        module: The layer.
        product: torchao's, `(input, weight, *options)`.
        options: Kernels, rounding of scales, and whether the gradient of the weight stays exact.
    """

    def __init__(self, module: nn.Module, product: Product, options: MxOptions) -> None:
        self._module, self._product, self._options = module, product, options

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """(…, out) of (…, in). Rows are filled up to blocks of 32: the gradient of the weight sums over them."""
        rows = input.reshape(-1, input.shape[-1])
        filled = nn.functional.pad(rows, (0, 0, 0, -len(rows) % BLOCK))
        output = self._product(filled, self._module.weight, *self._options)[: len(rows)]
        output = output.reshape(*input.shape[:-1], output.shape[-1])
        if self._module.bias is not None:
            output = output + self._module.bias.to(output.dtype)
        return output


class MxGroupedLinear:
    """A linear layer for each group of rows, as `grouped_linear`, by microscaled products of bf16 numbers.

    Groups are filled up with rows of zeros, which change no scale and no sum. Those without rows are given some, too:
    kernels on B200 return other gradients than zeros for the weight of an empty group (pytorch issue 172439). The host
    does not wait for the counts.

    Args:
        product: torchao's, `(rows, weight (G, in, out), ends of groups, …)`.
        options: Kernels, rounding of scales, and whether the gradient of the weight stays exact.
    """

    def __init__(self, product: Product, options: MxOptions) -> None:
        self._product, self._options = product, options

    @outside_graphs
    def __call__(
        self,
        rows_SI: torch.Tensor,
        weight: torch.Tensor,
        counts_G: torch.Tensor,
        bias_GO: torch.Tensor | None = None,
        *,
        transposed: bool = False,
    ) -> torch.Tensor:
        """(S, out), in the dtype of the weight. A `transposed` weight is copied into the other layout, and the copy is
        kept for the backward pass."""
        weight_GOI = weight
        if transposed:
            weight_GOI = weight.transpose(-2, -1)
        # The kernels know no other type; of weights that are bf16 and lie so, neither call makes a copy.
        weight_GOI = weight_GOI.to(torch.bfloat16).contiguous()
        filled = FilledGroups.of(counts_G, len(rows_SI))
        outputs = self._product(
            filled.rows(rows_SI.to(torch.bfloat16)),
            weight_GOI.transpose(-2, -1),
            filled.ends_G,
            out_dtype=torch.bfloat16,
            kernel_preference=self._options.kernels,
            scale_calculation_mode=self._options.scales,
            wgrad_with_hp=self._options.exact_weight_gradient,
        )
        return with_bias(taken(outputs, filled.places_S).to(weight.dtype), counts_G, bias_GO)


class FilledGroups(NamedTuple):
    """Where the rows of groups lie once each group is filled up to a multiple of `GROUP_ROWS`."""

    ends_G: torch.Tensor
    """Where each group ends, int32."""
    places_S: torch.Tensor
    """Where each row goes, in the order of the rows."""
    length: int
    """Rows in all, some of them behind the last group: as many as any such counts may need."""

    @classmethod
    def of(cls, counts_G: torch.Tensor, number: int) -> FilledGroups:
        """For groups of `counts_G` rows, which are `number` together."""
        filled_G = -(-counts_G.clamp(min=1) // GROUP_ROWS) * GROUP_ROWS
        ends_G = filled_G.cumsum(0)
        # How much further back a group begins than without what fills those before it.
        moved_G = (ends_G - filled_G) - (counts_G.cumsum(0) - counts_G)
        places = torch.arange(number, device=counts_G.device)
        places = places + moved_G.repeat_interleave(counts_G, output_size=number)
        return cls(ends_G.to(torch.int32), places, (number // GROUP_ROWS + len(counts_G)) * GROUP_ROWS)

    def rows(self, rows_SI: torch.Tensor) -> torch.Tensor:
        """(length, …): the rows in their places, and zeros around them."""
        return rows_SI.new_zeros(self.length, *rows_SI.shape[1:]).index_copy(0, self.places_S, rows_SI)
