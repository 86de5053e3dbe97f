"""How even the work of ranks is, and what planning it costs: rows of experts with copies of the busy ones, and the
media of towers.

Numbers of rows and sizes of pictures, for ranks that are only imagined: no model, no data. A rank plans the copies of a
layer and works out its own row and column of the table of what is sent; of its repetitions the shortest counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, of_spread
from benchmarks.rounds import spread

LAYERS = ((8, 128), (32, 256), (64, 256), (128, 384))
"""Ranks and experts."""
BOUND = (64, 256)
MOST_MS = 2.0
ROWS = 64
"""Of a rank for an expert, on average."""
COPIES = 2
REPEATS = 15
TOWER_RANKS, TOWER_STEPS, SAMPLES = 8, 50, (1, 4, 16)
MOST_OVER_BEST = 1.05


def run(_work: Path) -> dict[str, Any]:
    """Plan, and see how it comes out."""
    layers = {f"{ranks} × {experts}": of_layer(ranks, experts) for ranks, experts in LAYERS}
    towers = {str(samples): of_towers(samples) for samples in SAMPLES}
    return {
        "rows": ROWS,
        "copies": COPIES,
        "imbalance": "the fullest rank over the mean",
        "layers": layers,
        "towers": towers,
        "figures": [figure.to_dict() for figure in figures(layers, towers)],
    }


def figures(layers: dict[str, Any], towers: dict[str, Any]) -> list[Figure]:
    """Time and evenness of each."""
    found = []
    for name, layer in layers.items():
        is_bound = name == " × ".join(map(str, BOUND))
        found += [
            Figure(
                f"{name} experts: own row and column of the table",
                layer["table_ms"],
                "ms",
                MOST_MS if is_bound else None,
            ),
            Figure(f"{name} experts: copies", layer["plan_ms"], "ms"),
            Figure(f"{name} experts: the table, sent and received rows that differ", layer["differing"], "rows", 0),
            of_spread(f"{name} experts: imbalance at home", layer["at_home"], "×"),
            of_spread(f"{name} experts: imbalance with {COPIES} copies a rank", layer["with_copies"], "×"),
            of_spread(f"{name} experts: the same where as many as there are may be held", layer["with_any"], "×", 1.01),
        ]
    for samples, tower in towers.items():
        name = f"tower, {samples} samples a rank"
        found += [
            Figure(f"{name}: imbalance at home", tower["at_home"], "×"),
            Figure(f"{name}: imbalance shared", tower["shared"], "×"),
            Figure(f"{name}: the same / the best without cutting a picture", tower["over_best"], "×", MOST_OVER_BEST),
        ]
    return found


def of_layer(ranks: int, experts: int) -> dict[str, Any]:
    """Of routers that prefer some experts, as seen before they are balanced."""
    from mindspeed_mm.fsdp.distributed.expert.dispatch import plan_balance

    draw = np.random.default_rng(0)
    at_home, with_copies, with_any = [], [], []
    for _ in range(5):
        loads = draw.exponential(ROWS * draw.lognormal(0.0, 0.5, experts), (ranks, experts)).astype(np.int64)
        owned = loads.sum(axis=0).reshape(ranks, -1).sum(axis=1)
        at_home.append(float(owned.max() / owned.mean()))
        with_copies.append(_imbalance(plan_balance(loads, COPIES).shares_RE))
        with_any.append(_imbalance(plan_balance(loads, experts).shares_RE))
    plan = plan_balance(loads, COPIES)
    sent, received = (
        np.stack(tables) for tables in zip(*(plan.traffic_of(rank, loads) for rank in range(ranks)), strict=True)
    )
    return {
        "plan_ms": shortest_ms(lambda: plan_balance(loads, COPIES)),
        "table_ms": shortest_ms(lambda: plan.traffic_of(ranks // 2, loads)),
        "differing": int(np.abs(sent - received.swapaxes(0, 1)).sum() + np.abs(sent.sum(axis=1) - loads).sum()),
        "at_home": spread(at_home),
        "with_copies": spread(with_copies),
        "with_any": spread(with_any),
    }


def _imbalance(shares_RE: np.ndarray) -> float:
    of_rank = shares_RE.sum(axis=1)
    return float(of_rank.max() / of_rank.mean())


def shortest_ms(work: Callable[[], object]) -> float:
    """Of processor time."""
    found = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        found.append(1000 * (time.process_time() - began))
    return min(found)


def of_towers(samples: int) -> dict[str, float]:
    """Pictures of log-normal sides, 0 to 3 a sample, of ranks with so many samples; over several steps."""
    from mindspeed_mm.fsdp.distributed.towers.media import Grid, Imbalance, TowerWidths, assign

    draw, widths = np.random.default_rng(0), TowerWidths(hidden=1152, mlp=4304)
    found, best = Imbalance(), 0.0
    for _ in range(TOWER_STEPS):
        counts = np.maximum(1, draw.choice([0, 1, 1, 2, 3], (TOWER_RANKS, samples)).sum(axis=1))
        homes = np.arange(TOWER_RANKS).repeat(counts).tolist()
        sides = 2 * np.clip(np.round(draw.lognormal(2.6, 0.7, (len(homes), 2))), 2, 64).astype(int)
        costs = [widths.cost(Grid(1, height, width)) for height, width in sides.tolist()]
        found.add(costs, homes, assign(costs, homes, TOWER_RANKS), TOWER_RANKS)
        best += max(max(costs), sum(costs) / TOWER_RANKS)
    return {
        "at_home": found.ratio_at_home,
        "shared": found.ratio,
        "over_best": found.busiest / best,
    }
