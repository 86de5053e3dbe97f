"""Micro-batches made by size: how full packs are, how even the ranks' work is, and how long planning a step takes.

No model is run: costs are those of `fsdp/data/dataloader/planning.py` (tokens, attention, encoder), for 8 ranks that
are only imagined, over 20,000 samples of three kinds. The plain sampler deals the same samples as they come, so many a
micro-batch that it holds as many tokens on average.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, of_spread
from benchmarks.rounds import spread

RANKS = 8
SAMPLES = 20_000
STEPS = 100
CAPACITY = 4096
TARGET_USEFUL, TARGET_IMBALANCE = 0.98, 1.05


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    cases = {name: measure(sizes) for name, sizes in mixes().items()}
    return {
        "ranks": RANKS,
        "capacity_tokens": CAPACITY,
        "samples": SAMPLES,
        "steps": STEPS,
        "imbalance": "max over ranks / mean over ranks of the cost of a step, mean over steps",
        "useful": "tokens of samples / tokens that fit the packs; for padded micro-batches / tokens computed",
        "cases": cases,
        "figures": [figure.to_dict() for name, case in cases.items() for figure in figures(name, case)],
    }


def mixes() -> dict[str, list[tuple[int, int]]]:
    """Kind of data → (tokens, patches) of its samples."""
    random = np.random.default_rng(0)
    text = np.clip(random.lognormal(6.0, 1.0, SAMPLES), 8, CAPACITY).astype(int)
    words = np.clip(random.lognormal(5.5, 1.0, SAMPLES), 8, CAPACITY // 2).astype(int)
    kind, pictures = random.random(SAMPLES), random.choice([256, 576, 1024, 2304], SAMPLES)
    patches = np.where(kind < 0.4, 0, pictures)
    clips = np.where(kind > 0.9, random.integers(2000, 8000, SAMPLES), patches)
    return {
        "text, log-normal": [(int(n), 0) for n in text],
        "text and pictures": [(int(n + p // 4), int(p)) for n, p in zip(words, patches, strict=True)],
        "text, pictures, clips": [(int(n + p // 4), int(p)) for n, p in zip(words, clips, strict=True)],
    }


def measure(samples: list[tuple[int, int]]) -> dict[str, Any]:
    """Packed, padded under a budget, of similar length, and as they come."""
    from mindspeed_mm.fsdp.data.dataloader.planning import BatchShape

    rows = max(1, round(CAPACITY / statistics.fmean(tokens for tokens, _ in samples)))
    shapes = {
        "packed": BatchShape("packed", CAPACITY),
        "budget": BatchShape("padded", CAPACITY, multiple=8),
        "similar length": BatchShape("rows", CAPACITY, rows=rows, multiple=8),
    }
    return {name: planned(samples, shape) for name, shape in shapes.items()} | {"as they come": plain(samples, rows)}


def planned(samples: list[tuple[int, int]], shape: Any) -> dict[str, Any]:
    """An order's steps: their seconds, how even they are, how full."""
    from mindspeed_mm.fsdp.data.data_utils.sample import SampleSize
    from mindspeed_mm.fsdp.data.dataloader.buffered import BufferedOrder
    from mindspeed_mm.fsdp.data.dataloader.order import DataPosition, Deal
    from mindspeed_mm.fsdp.data.dataloader.planning import imbalance
    from mindspeed_mm.fsdp.data.dataloader.sampler import BaseRandomBatchSampler
    from mindspeed_mm.fsdp.data.dataloader.sizes import Measured, SizeBook

    book = SizeBook(lambda asked: Measured(np.array([samples[row] for row in asked], dtype=np.int32), {}))
    book.learn(np.array(samples))
    order = BufferedOrder(BaseRandomBatchSampler(len(samples), 0), book, shape, Deal(1, 1, 0, RANKS), drop_last=False)
    position, seconds, even, useful, held = DataPosition(0, 0), [], [], [], []
    for _ in range(STEPS):
        started = time.perf_counter()
        step = order.step(position)
        seconds.append(time.perf_counter() - started)
        even.append(imbalance([batch.cost for batch in step.step], RANKS))
        for batch in step.step:
            sizes = [SampleSize(*samples[pick.row]) for pick in batch.picks]
            computed = CAPACITY if shape.kind == "packed" else len(sizes) * max(shape.padded(s.tokens) for s in sizes)
            useful.append(sum(size.tokens for size in sizes) / computed)
        position = step.after
        held.append(len(position.pending))
    return {
        "plan_ms": spread([1000 * each for each in seconds]),
        "imbalance": {"mean": statistics.fmean(even), "p95": float(np.quantile(even, 0.95)), "max": max(even)},
        "useful": statistics.fmean(useful),
        "pending_samples": max(held),
    }


def plain(samples: list[tuple[int, int]], rows: int) -> dict[str, Any]:
    """Padded micro-batches of samples as a shuffle gives them."""
    from mindspeed_mm.fsdp.data.data_utils.sample import SampleSize
    from mindspeed_mm.fsdp.data.dataloader.planning import BatchShape, imbalance

    shape, shuffled = BatchShape("rows", CAPACITY, rows=rows, multiple=8), np.random.default_rng(1).permutation(samples)
    batches = [
        [SampleSize(*map(int, s)) for s in part] for part in shuffled[: STEPS * RANKS * rows].reshape(-1, rows, 2)
    ]
    costs = [shape.cost(batch) for batch in batches]
    even = [imbalance(costs[i : i + RANKS], RANKS) for i in range(0, len(costs) - RANKS + 1, RANKS)]
    useful = [sum(s.tokens for s in b) / (len(b) * max(shape.padded(s.tokens) for s in b)) for b in batches]
    return {
        "imbalance": {"mean": statistics.fmean(even), "p95": float(np.quantile(even, 0.95)), "max": max(even)},
        "useful": statistics.fmean(useful),
    }


def figures(name: str, case: dict[str, Any]) -> list[Figure]:
    """Full packs, even ranks, and the plain sampler beside them."""
    found = []
    for way, result in case.items():
        is_ours = way != "as they come"
        least = TARGET_USEFUL if way == "packed" and name.startswith("text, log-normal") else None
        found.append(Figure(f"{name}, {way}: useful tokens", result["useful"], "", at_least=least))
        most = TARGET_IMBALANCE if is_ours and way != "similar length" else None
        found.append(Figure(f"{name}, {way}: rank imbalance", result["imbalance"]["mean"], "", at_most=most))
        if is_ours:
            found.append(of_spread(f"{name}, {way}: planning a step", result["plan_ms"], "ms"))
    return found
