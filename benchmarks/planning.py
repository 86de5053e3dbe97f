"""What planning packed steps costs a rank: CPU in all, and what the trainer's thread loses to it while it is at work.

The order over 10⁶ samples of known sizes, for data ranks that are only imagined; no model, no data. The trainer is a
loop of pure Python that asks for a step before each turn. A turn is long enough that the next plan is made meanwhile;
what it takes longer than a turn without a plan is what the thread loses: the question, the answer, and whatever held
the interpreter's lock. Of both kinds the shortest turn counts: others were disturbed by what else the machine does.
Besides: best fit alone, where tokens bind and where patches do.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, of_spread
from benchmarks.rounds import spread

ROWS = 1_000_000
RANKS = (8, 64, 256, 1024)
TOKENS, PATCHES = 8192, 32768
SCARCE_PATCHES = 5120
"""A quarter of what the samples of a full pack have."""
TURNS = 60
TURN_ROUNDS = 1_000_000
"""Additions of a turn, which is longer than a plan."""
FIT_SAMPLES = 8000
MOST_CPU_MS, MOST_LOST_MS, MOST_RATIO = 250.0, 5.0, 2.0


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    cases = {str(ranks): measure(ranks) for ranks in RANKS}
    fits = {"tokens bind": fit(PATCHES), "patches bind": fit(SCARCE_PATCHES)}
    found = [figure for ranks, case in cases.items() for figure in figures(ranks, case)]
    found += [of_spread(f"best fit of {FIT_SAMPLES:,} samples, {name}", each, "ms") for name, each in fits.items()]
    ratio = fits["patches bind"]["median"] / fits["tokens bind"]["median"]
    found.append(Figure("the same, patches bind / tokens bind", ratio, "×", at_most=MOST_RATIO))
    return {
        "rows": ROWS,
        "capacity": {"tokens": TOKENS, "patches": PATCHES, "scarce_patches": SCARCE_PATCHES},
        "cases": cases,
        "best_fit": fits,
        "figures": [figure.to_dict() for figure in found],
    }


def samples(count: int) -> np.ndarray:
    """(count, 2) tokens, log-normal, and 2.5 patches for each."""
    tokens = np.minimum(TOKENS, np.random.default_rng(0).lognormal(5.9, 0.8, count).astype(int) + 16)
    return np.stack([tokens, (tokens * 2.5).astype(int)], axis=1)


def order_of(ranks: int) -> Any:
    """The order of a run on so many data ranks."""
    from mindspeed_mm.fsdp.data.dataloader.buffered import BufferedOrder
    from mindspeed_mm.fsdp.data.dataloader.order import Deal
    from mindspeed_mm.fsdp.data.dataloader.planning import BatchShape
    from mindspeed_mm.fsdp.data.dataloader.sampler import SequentialSampler
    from mindspeed_mm.fsdp.data.dataloader.sizes import Measured, SizeBook

    book = SizeBook(lambda asked: Measured(np.zeros((len(asked), 2), dtype=np.int32), {}))
    book.learn(samples(ROWS))
    shape = BatchShape("packed", TOKENS, PATCHES)
    return BufferedOrder(SequentialSampler(ROWS), book, shape, Deal(1, 1, 0, ranks), drop_last=True)


def measure(ranks: int) -> dict[str, Any]:
    """CPU of a step's plan, all of it made here; and what a turn takes longer with a plan under way."""
    from mindspeed_mm.fsdp.data.dataloader.order import DataPosition

    order, position = order_of(ranks), DataPosition(0, 0)
    cpu = []
    for _ in range(6):
        began = time.process_time()
        position = order.step(position).after
        cpu.append(1000 * (time.process_time() - began))
    alone, beside = [], []
    with closing(order.steps(position, ahead=True)) as steps:
        next(steps)
        for _ in range(TURNS):
            alone.append(turn())
            beside.append(turn(steps))
    return {
        "cpu_ms": spread(cpu[1:]),
        "turn_alone_ms": spread([1000 * wall for wall, _ in alone]),
        "turn_beside_ms": spread([1000 * wall for wall, _ in beside]),
        "lost_ms": 1000 * (min(wall for wall, _ in beside) - min(wall for wall, _ in alone)),
        "lost_cpu_ms": 1000 * (min(cpu for _, cpu in beside) - min(cpu for _, cpu in alone)),
        "pending_samples": len(position.pending),
    }


def turn(steps: Any = None) -> tuple[float, float]:
    """Seconds of a turn, and those of this thread's CPU."""
    began, began_cpu = time.perf_counter(), time.thread_time()
    if steps is not None:
        next(steps)
    total = 0
    for number in range(TURN_ROUNDS):
        total += number
    return time.perf_counter() - began, time.thread_time() - began_cpu


def fit(max_patches: int) -> dict[str, Any]:
    """Milliseconds of CPU of best fit alone."""
    from mindspeed_mm.fsdp.data.data_utils.packing import best_fit

    tokens, patches = samples(FIT_SAMPLES).T
    found = []
    for _ in range(7):
        began = time.process_time()
        best_fit(tokens, TOKENS, np.minimum(patches, max_patches), max_patches)
        found.append(1000 * (time.process_time() - began))
    return spread(found)


def figures(ranks: str, case: dict[str, Any]) -> list[Figure]:
    """Of one number of ranks."""
    return [
        of_spread(f"{ranks} data ranks: CPU of a step's plan", case["cpu_ms"], "ms", at_most=MOST_CPU_MS),
        Figure(f"{ranks} data ranks: lost by the trainer's thread", case["lost_ms"], "ms", at_most=MOST_LOST_MS),
        Figure(f"{ranks} data ranks: of that its CPU", case["lost_cpu_ms"], "ms"),
    ]
