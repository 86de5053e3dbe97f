"""Many small matrix products in one: rows that stand sorted by group, each group with a weight of its own.

Torch's `grouped_mm` where it has the type and the device, else a loop over the groups: one interface, the same
gradients. Groups without rows get gradients of zero, never none: sharded gradients are summed over ranks that may have
rows there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx

from mindspeed_mm.fsdp.ops.host_values import host_values, outside_graphs

_KERNEL_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16,),
}
_ALIGNMENT_BYTES = 16
"""What the kernels want rows of a matrix to begin at."""


class GroupedLinear(Protocol):
    """A linear layer for each group of rows: `grouped_linear`, or what computes the same in another format."""

    def __call__(
        self,
        rows_SI: torch.Tensor,
        weight: torch.Tensor,
        counts_G: torch.Tensor,
        bias_GO: torch.Tensor | None = None,
        *,
        transposed: bool = False,
    ) -> torch.Tensor:
        """(S, out), in the dtype of the weight. Arguments as of `grouped_linear`."""
        ...


def grouped_linear(
    rows_SI: torch.Tensor,
    weight: torch.Tensor,
    counts_G: torch.Tensor,
    bias_GO: torch.Tensor | None = None,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """A linear layer for each group of rows.

    Args:
        rows_SI: (S, in), the rows of group 0, then those of group 1, …
        weight: (G, out, in), or (G, in, out) when `transposed`.
        counts_G: Rows of each group; they sum to S. On the device of the rows.
        bias_GO: (G, out).
        transposed: The layout of `weight`.

    Returns:
        (S, out), in the dtype of the weight.
    """
    weight_GIO = weight if transposed else weight.transpose(-2, -1)
    rows_SI = rows_SI.to(weight.dtype)
    if has_kernel(rows_SI, weight):
        offsets_G = counts_G.cumsum(0).to(torch.int32)
        outputs_SO = _contiguous_gradient(F.grouped_mm(rows_SI, weight_GIO, offs=offsets_G))
    else:
        outputs_SO = _by_loop(rows_SI, weight_GIO, counts_G)
    return with_bias(outputs_SO, counts_G, bias_GO)


def with_bias(outputs_SO: torch.Tensor, counts_G: torch.Tensor, bias_GO: torch.Tensor | None) -> torch.Tensor:
    """(S, out): outputs of groups, each with its own row of `bias_GO` added where there is one."""
    if bias_GO is None:
        return outputs_SO
    return outputs_SO + bias_GO.repeat_interleave(counts_G, dim=0, output_size=len(outputs_SO))


def has_kernel(rows_SI: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `grouped_mm` takes these: by type, device and alignment, and with at least one row."""
    if weight.dtype not in _KERNEL_DTYPES.get(weight.device.type, ()) or not len(rows_SI):
        return False
    return all(size * weight.element_size() % _ALIGNMENT_BYTES == 0 for size in weight.shape[1:])


@outside_graphs
def _by_loop(rows_SI: torch.Tensor, weight_GIO: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    return _Loop.apply(rows_SI, weight_GIO, host_values(counts_G))  # type: ignore[no-untyped-call, no-any-return]


class _Loop(torch.autograd.Function):
    """Computes one matrix product after the other, one for each group."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows_SI: torch.Tensor, weight_GIO: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_SI, weight_GIO)
        ctx.counts = counts
        outputs = rows_SI.new_empty(len(rows_SI), weight_GIO.shape[2])
        for part, rows, weight in zip(outputs.split(counts), rows_SI.split(counts), weight_GIO, strict=True):
            torch.mm(rows, weight, out=part)
        return outputs

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient_SO,) = gradients
        rows_SI, weight_GIO = ctx.saved_tensors
        of_rows = of_weight = None
        parts = gradient_SO.split(ctx.counts)
        if ctx.needs_input_grad[0]:
            products = [part @ weight.T for part, weight in zip(parts, weight_GIO, strict=True)]
            of_rows = torch.cat(products)
        if ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight_GIO)
            for own, rows, part in zip(of_weight, rows_SI.split(ctx.counts), parts, strict=True):
                if len(rows):
                    own.copy_(rows.T @ part)
        return of_rows, of_weight, None


def _contiguous_gradient(outputs: torch.Tensor) -> torch.Tensor:
    """The same tensor. Its gradient arrives as memory of its own: the kernel refuses one that is expanded from a single
    number, as `sum()` makes them."""
    return _ContiguousGradient.apply(outputs)  # type: ignore[no-untyped-call]


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].contiguous()
