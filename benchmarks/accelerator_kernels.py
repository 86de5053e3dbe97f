"""Times kernels whose choice depends on the device: grouped matrix products in each type against the loop, and packed
attention with keys and values as they are against repeated ones.

`python -m benchmarks.accelerator_kernels` prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_mm.fsdp.ops import attention, grouped_matmul
from mindspeed_mm.fsdp.utils.device import current_device, synchronize

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REPEATS = 20


def main() -> None:
    """Print one JSON line."""
    tiny, device = "--tiny" in sys.argv, current_device()
    print(json.dumps({"grouped_ms": grouped(device, tiny), "packed_attention_ms": packed(device, tiny)}))


def milliseconds(work: Callable[[], Any]) -> float:
    """Of one call, after a warm-up."""
    for count in (3, REPEATS):
        synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            work()
        synchronize()
    return round(1000 * (time.perf_counter() - begin) / REPEATS, 4)


def grouped(device: torch.device, tiny: bool) -> dict[str, dict[str, float | str]]:
    """Type → torch's kernel and the loop over groups, forward and backward."""
    groups, rows, width = (4, 32, 16) if tiny else (64, 256, 1024)
    times: dict[str, dict[str, float | str]] = {}
    for dtype in DTYPES:
        inputs = torch.randn(groups * rows, width, dtype=dtype, device=device, requires_grad=True)
        weight = torch.randn(groups, width, width, dtype=dtype, device=device, requires_grad=True)
        counts = torch.full((groups,), rows, device=device)
        offsets = counts.cumsum(0).to(torch.int32)
        ways = {
            "kernel": lambda: torch.nn.functional.grouped_mm(inputs, weight, offs=offsets).square().sum().backward(),  # noqa: B023 (called at once)
            "loop": lambda: grouped_matmul._by_loop(inputs, weight, counts).square().sum().backward(),  # noqa: B023
        }
        times[str(dtype).removeprefix("torch.")] = {name: attempted(work) for name, work in ways.items()}
    return times


def packed(device: torch.device, tiny: bool) -> dict[str, float | str]:
    """A packed row of eight documents, 32 heads over 8: as the layer calls it, and with keys repeated before."""
    heads, kept, length, width = (4, 2, 16, 16) if tiny else (32, 8, 512, 128)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    sizes = ((1, count, 8 * length, width) for count in (heads, kept, kept))
    q, k, v = (torch.randn(size, dtype=dtype, device=device, requires_grad=True) for size in sizes)
    borders = torch.arange(0, 8 * length + 1, length, dtype=torch.int32, device=device)
    lengths = {"cu_seq_lens_q": borders, "max_length_q": length, "max_length_k": length}

    def step(keys: torch.Tensor, values: torch.Tensor) -> None:
        out, _ = attention.varlen_attention(torch.nn.Module(), q, keys, values, None, **lengths)
        out.sum().backward()

    repeated = lambda tensor: tensor.repeat_interleave(heads // kept, dim=1)  # noqa: E731
    return {
        "keys as they are": attempted(lambda: step(k, v)),
        "keys repeated": attempted(lambda: step(repeated(k), repeated(v))),
    }


def attempted(work: Callable[[], Any]) -> float | str:
    """Milliseconds, or why it does not run here."""
    try:
        return milliseconds(work)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).partition("\n")[0][:200]


if __name__ == "__main__":
    main()
