"""Operators of parallel plans on one device, against plain computation in fp64 on the CPU: the ring's kernels and merge
with its ranks played one after the other, and grouped matrix products.

Shapes: B rows, L tokens of all ranks, T of one, H heads, K key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_mm.fsdp.ops.context_attention.block_kernels import NEVER, kernel_for
from mindspeed_mm.fsdp.ops.context_attention.layer import merge_
from mindspeed_mm.fsdp.ops.context_attention.layout import SequenceLayout, build_layout, plan_rectangles
from mindspeed_mm.fsdp.ops.grouped_matmul import grouped_linear

Results = dict[str, Tensor]
RING, B, L, H, K, D = 4, 2, 256, 8, 4, 64
RTOL = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
COUNTS = [0, 40, 8, 80, 0, 16, 64, 48]
"""Rows of each group."""


def own_dtype(device: torch.device) -> torch.dtype:
    """What training computes in there: bf16 with the device's own kernels, fp32 on a CPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def ring(device: torch.device, *, causal: bool) -> tuple[Results, Results, Results, float]:
    """Attention of a sequence that lies zigzag over four ranks. The mistake: partial outputs that are merely added."""
    dtype = own_dtype(device)
    torch.manual_seed(0)
    q, grad = (torch.randn(B, L, H, D).to(dtype) for _ in range(2))
    k, v = (torch.randn(B, L, K, D).to(dtype) for _ in range(2))
    reference = dense(*(each.double() for each in (q, k, v, grad)), causal=causal)
    on_device = [each.to(device) for each in (q, k, v, grad)]
    found = played(*on_device, causal=causal, merge=merge_)
    return found, reference, played(*on_device, causal=causal, merge=added_), RTOL[dtype]


def dense(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, causal: bool) -> Results:
    """Softmax of all scores at once, and its gradients by autograd."""
    q, k, v = (each.requires_grad_() for each in (q, k, v))
    keys, values = (each.repeat_interleave(H // K, dim=2) for each in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, keys) * D**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), NEVER)
    out = torch.einsum("bhts,bshd->bthd", scores.softmax(dim=-1), values)
    gradients = torch.autograd.grad(out, (q, k, v), grad)
    return {"out": out.detach(), **dict(zip(("q", "k", "v"), gradients, strict=True))}


def played(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, causal: bool, merge: Callable[..., None]) -> Results:
    """What the ranks of a ring would compute, one after the other: every rectangle by the device's kernel, outputs
    merged, gradients with the log-sum-exp of the whole row."""
    layout, kernel = build_layout(L, RING, 1, balanced=True), kernel_for(q, v, masked=False)
    places = [torch.tensor(layout.positions(rank, 0), device=q.device) for rank in range(RING)]
    whole = {name: torch.zeros(each.shape, device=q.device) for name, each in zip("oqkv", (q, q, k, v), strict=True)}
    for rank, own in enumerate(places):
        out, lse = forward(q[:, own], k, v, layout, places, rank, kernel, causal, merge)
        whole["o"][:, own] = out.float()
        for source, rectangle in work(layout, rank, causal):
            rows, keys = own[rectangle.q_start : rectangle.q_stop], places[source][rectangle.k_start : rectangle.k_stop]
            local = slice(rectangle.q_start, rectangle.q_stop)
            parts = kernel.backward(
                grad[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, local], lse[:, local], None,
                causal=rectangle.causal, scale=D**-0.5,
            )  # fmt: skip
            for name, at, part in zip("qkv", (rows, keys, keys), parts, strict=True):
                whole[name].index_add_(1, at, part.float())
    return {"out" if name == "o" else name: each.cpu() for name, each in whole.items()}


def forward(
    q_BTHD: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    places: list[Tensor],
    rank: int,
    kernel: Any,
    causal: bool,
    merge: Callable[..., None],
) -> tuple[Tensor, Tensor]:
    """Output of one rank's queries, and their log-sum-exp."""
    total = torch.zeros(q_BTHD.shape, device=q_BTHD.device)
    lse = torch.full(q_BTHD.shape[:3], NEVER, device=q_BTHD.device)
    for source, rectangle in work(layout, rank, causal):
        rows, keys = slice(rectangle.q_start, rectangle.q_stop), places[source][rectangle.k_start : rectangle.k_stop]
        part, part_lse = kernel.forward(
            q_BTHD[:, rows], k[:, keys], v[:, keys], None, causal=rectangle.causal, scale=D**-0.5
        )
        merge(total[:, rows], lse[:, rows], part, part_lse)
    return total.to(q_BTHD.dtype), lse


def work(layout: SequenceLayout, rank: int, causal: bool) -> list[tuple[int, Any]]:
    """(source of the keys, rectangle), in the order in which keys come round."""
    rectangles = plan_rectangles(layout, layout, rank, causal)
    order = [(rank - step) % RING for step in range(RING)]
    return [(source, rectangle) for source in order for rectangle in rectangles[source]]


def added_(total: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """A mistake: outputs are added without their weights."""
    total.add_(part)
    lse.copy_(torch.logaddexp(lse, part_lse))


def grouped(device: torch.device) -> tuple[Results, Results, Results, float]:
    """Matrix products of sorted rows, some groups empty. The mistake: a row counted to the group beside its own."""
    dtype = own_dtype(device)
    torch.manual_seed(0)
    rows, weight, grad = torch.randn(sum(COUNTS), 64), torch.randn(len(COUNTS), 96, 64), torch.randn(sum(COUNTS), 96)
    rows, weight, grad = (each.to(dtype) for each in (rows, weight, grad))
    reference = products(rows.double(), weight.double(), grad.double(), one_by_one, COUNTS)
    rows, weight, grad = (each.to(device) for each in (rows, weight, grad))
    found = products(rows, weight, grad, grouped_rows, COUNTS)
    faulty = products(rows, weight, grad, grouped_rows, [1, COUNTS[1] - 1, *COUNTS[2:]])
    return found, reference, faulty, RTOL[dtype]


def products(rows: Tensor, weight: Tensor, grad: Tensor, multiply: Callable[..., Tensor], counts: list[int]) -> Results:
    """Outputs and gradients."""
    rows, weight = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    out = multiply(rows, weight, counts)
    of_rows, of_weight = torch.autograd.grad(out, (rows, weight), grad)
    return {"out": out.detach().cpu(), "rows": of_rows.cpu(), "weight": of_weight.cpu()}


def grouped_rows(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """By the device's kernel, where it takes these."""
    return grouped_linear(rows, weight, torch.tensor(counts, device=rows.device))


def one_by_one(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """A product for each group."""
    return torch.cat([part @ each.T for part, each in zip(rows.split(counts), weight, strict=True)])


OPERATORS: dict[str, Callable[[torch.device], tuple[Results, Results, Results, float]]] = {
    "ring attention, causal, 4 ranks in turns": lambda device: ring(device, causal=True),
    "ring attention, full, 4 ranks in turns": lambda device: ring(device, causal=False),
    "grouped matrix products": grouped,
}
