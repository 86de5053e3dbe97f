"""Output head and cross-entropy in slices of 512 rows against whole logits: added memory and time of one pass.

Vocabulary 151,936, hidden 1,024, 4,096 tokens, forward and backward. `python -m benchmarks.chunk_loss KIND DTYPE` is
one pass in a process of its own; it prints one JSON line. Memory is what the pass adds at its highest over weight,
inputs and targets in place, the gradients of hidden states and weight included.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.figures import Figure, of_spread
from benchmarks.rounds import ROUGH, Rounds, spread

VOCABULARY, HIDDEN, TOKENS, SLICE = 151_936, 1024, 4096, 512
KINDS = ("gradients in the forward pass", "recomputed")
MEMORY_TARGETS = {"bf16": 1 / 7, "fp32": 1 / 5}
TIME_TARGET = 1.0
ACCEPTED_ROUNDS = 5
LIMIT_S = 420.0
"""For the rounds of each type."""
TIMEOUT_S = 300.0


def run(_work: Path) -> dict[str, Any]:
    """Measure."""
    found = {dtype: measured(dtype) for dtype in MEMORY_TARGETS}
    return {
        "vocabulary": VOCABULARY,
        "hidden": HIDDEN,
        "tokens": TOKENS,
        "slice": SLICE,
        "unit": "s and MB of one forward and backward pass; memory over weight, inputs and targets",
        "rounds": found,
        "figures": [figure.to_dict() for dtype, summary in found.items() for figure in figures(dtype, summary)],
    }


def measured(dtype: str) -> dict[str, Any]:
    """Rounds of both ways in slices between passes over whole logits."""

    def contender(kind: str) -> Callable[[], dict[str, Any]]:
        command = [sys.executable, "-m", "benchmarks.chunk_loss", kind, dtype]
        return lambda: processes.run(command, timeout_s=TIMEOUT_S).last_json()

    print(f"  {dtype}: at most {LIMIT_S:.0f} s", flush=True)
    rounds = Rounds(contender("plain"), {kind: contender(kind) for kind in KINDS}, *ROUGH)
    rounds.measure(ACCEPTED_ROUNDS, LIMIT_S)
    return rounds.summary() | {
        "added_mb": {
            "plain": spread([run["added_mb"] for run in rounds.floors]),
            **{kind: spread([one.run["added_mb"] for one in rounds.rounds if one.contender == kind]) for kind in KINDS},
        }
    }


def figures(dtype: str, summary: dict[str, Any]) -> list[Figure]:
    """Plain numbers, and of each way in slices its share of memory and time; the targets are those of the first."""
    added = summary["added_mb"]
    found = [
        of_spread(f"{dtype}, whole logits: time", summary["floor"], "s"),
        of_spread(f"{dtype}, whole logits: added memory", added["plain"], "MB"),
    ]
    for kind in KINDS:
        is_first, held = kind == KINDS[0], added[kind]
        whole = added["plain"]["median"]
        share = {name: value if name == "n" or value is None else value / whole for name, value in held.items()}
        memory, times = f"{dtype}, {kind}: added memory / whole logits", f"{dtype}, {kind}: time / whole logits"
        found += [
            of_spread(f"{dtype}, {kind}: added memory", held, "MB"),
            of_spread(memory, share, "×", MEMORY_TARGETS[dtype] if is_first else None),
            of_spread(times, summary["ratio_to_floor"][kind], "×", TIME_TARGET if is_first else None),
        ]
    return found


# --- one pass ---------------------------------------------------------------------------------------------------------


def main(kind: str, dtype_name: str) -> None:
    """Time one pass and see what it holds."""
    import torch

    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype_name]
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=dtype).div_(HIDDEN**0.5).requires_grad_()
    hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    loss_of = losses()[kind]
    (loss_of(hidden[:8].detach(), weight[:512].detach().requires_grad_(), targets[:8] % 512) / 8).backward()
    before_mb = held_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the highest so far is forgotten
    began, cpu_began = time.perf_counter(), time.process_time()
    loss = loss_of(hidden, weight, targets) / TOKENS
    loss.backward()
    value, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    added_mb = held_mb("VmHWM") - before_mb
    assert hidden.grad is not None and weight.grad is not None
    checked = {"loss": loss.item(), "gradient": weight.grad.float().norm().item()}
    print(json.dumps({"value": value, "cpu_s": cpu_s, "added_mb": added_mb, **checked}))


def losses() -> dict[str, Callable[[Any, Any, Any], Any]]:
    """Kind → the sum of the losses of hidden states, weight and targets."""
    import torch.nn.functional as F

    from mindspeed_mm.fsdp.ops.linear_cross_entropy import (
        LossPlan,
        linear_cross_entropy,
        recomputed_cross_entropy,
        whole_cross_entropy,
    )

    plan = LossPlan(SLICE)
    return {
        "plain": lambda hidden, weight, targets: whole_cross_entropy(F.linear(hidden, weight), targets).loss,
        KINDS[0]: lambda hidden, weight, targets: linear_cross_entropy(hidden, weight, targets, plan).loss,
        KINDS[1]: lambda hidden, weight, targets: (
            recomputed_cross_entropy(lambda rows: F.linear(rows, weight), hidden, targets, plan).loss
        ),
    }


def held_mb(name: str) -> float:
    """Resident memory of this process: now (`VmRSS`) or at its highest (`VmHWM`)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1000
    raise RuntimeError(f"this process tells no {name}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
