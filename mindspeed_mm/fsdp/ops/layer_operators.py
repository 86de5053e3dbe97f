"""What norms, rotary embeddings and gated linear units compute between the matrix products of a layer: the plain
formulas, and each of them as one compiled function, which is a kernel each way on a device.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_mm.fsdp.ops.compiled_calls import CountedBackend, most_graphs


def plain_norm(x: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor:
    """x / √(mean(x²) + eps) · (offset + weight), in fp32 inside (Zhang & Sennrich 2019, arXiv:1910.07467).

    Args:
        x: (…, H).
        weight: (H,).
        eps: Added to the mean square.
        offset: Added to the weight.
        rounds_first: Whether to round to the type of x in front of the weight, or behind it.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if rounds_first:
        weight = offset + weight if offset else weight
        return weight * normed.to(x.dtype)
    return (normed * (offset + weight.to(normed.dtype))).to(x.dtype)


def plain_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(B, H, T, D) with each head's halves turned into each other; cosines and sines (B, T, D) (Su et al. 2021,
    arXiv:2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)


def plain_gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, of two tensors of one shape (Shazeer 2020, arXiv:2002.05202)."""
    return F.silu(gate) * up


def compiled_norm(x: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor:
    """`plain_norm` by one kernel each way. Rows are counted together, so that the compiler sees two dimensions only."""
    if torch.compiler.is_compiling():  # of a graph around it, it becomes a part
        return plain_norm(x, weight, eps, offset, rounds_first)
    rows = x.reshape(-1, x.shape[-1])
    output: Tensor = _norm_of(eps, offset, rounds_first)(rows, weight)
    return output.view(x.shape)


def compiled_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`plain_rotary` of queries and keys by one kernel each way."""
    if torch.compiler.is_compiling():
        return plain_rotary(q, cos, sin), plain_rotary(k, cos, sin)
    turned_q, turned_k = _rotary_of(q.shape[-1])(q, k, cos, sin)
    return turned_q, turned_k


def compiled_gate(gate: Tensor, up: Tensor) -> Tensor:
    """`plain_gate` by one kernel each way."""
    if torch.compiler.is_compiling():
        return plain_gate(gate, up)
    output: Tensor = _gate()(gate, up)
    return output


def graph_runs() -> Counter[str]:
    """How often graphs of these functions ran in this process, by function: none where a compiler was asked for and
    plain operations ran."""
    return Counter({name: backend.runs for name, backend in _BACKENDS.items()})


# --- the compiled functions -------------------------------------------------------------------------------------------

_BACKENDS = {name: CountedBackend("inductor") for name in ("norm", "rotary", "gate")}


def _compiled(function: FunctionType, name: str) -> Callable[..., object]:
    """A function in graphs of its own, which take sizes as variables. The compiler keeps graphs by code: each function
    gets code of its own, lest many of them share one limit."""
    own = FunctionType(
        function.__code__.replace(co_name=f"mm_{name}"), function.__globals__, name, None, function.__closure__
    )
    return torch.compile(own, backend=_BACKENDS[name], dynamic=True, **most_graphs())


@functools.cache
def _norm_of(eps: float, offset: float, rounds_first: bool) -> Callable[..., object]:
    # As words, which stay constants: a number of Python would be a variable, copied to a tensor at every call.
    eps_word, offset_word = repr(eps), repr(offset)

    def norm(rows: Tensor, weight: Tensor) -> Tensor:
        return plain_norm(rows, weight, float(eps_word), float(offset_word), rounds_first)

    return _compiled(norm, "norm")  # type: ignore[arg-type]


@functools.cache
def _rotary_of(width: int) -> Callable[..., Any]:
    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        torch._check(q.shape[-1] == width)  # heads have one width: the kernel need not take it as a variable
        return plain_rotary(q, cos, sin), plain_rotary(k, cos, sin)

    return _compiled(rotary, "rotary")  # type: ignore[arg-type]


@functools.cache
def _gate() -> Callable[..., object]:
    return _compiled(plain_gate, "gate")  # type: ignore[arg-type]
