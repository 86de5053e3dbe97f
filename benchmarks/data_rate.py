"""Samples a second: on the fly and from the cache, beside a plain DataLoader over transformers' processor and beside
`datasets.map` with what it stores read again. Equal batches are checked to the bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks import conversations, processes
from benchmarks.data_contenders import BATCH, FLOOR, WORKERS
from benchmarks.extraction import inverse
from benchmarks.figures import Figure, of_spread
from benchmarks.rounds import spread

ROUNDS = 5
LIMIT_S = 75.0
"""Of each of the three sets of rounds."""
TIMEOUT_S = 600.0
MOST_BYTES = 40_000
LEAST_REREAD = 9_000


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    folder = work / "pictures"
    conversations.prepare("pictures", folder, conversations.PICTURES)
    command = [sys.executable, "-m", "benchmarks.data_contenders", str(folder), str(ROUNDS), str(LIMIT_S)]
    result = processes.run(command, timeout_s=TIMEOUT_S).last_json()
    return {
        "rows": f"{result['samples']} conversations, each about a PNG of {conversations.SIDE} × {conversations.SIDE}",
        "batch": BATCH,
        "unit": "ms a sample, over a pass; checked before: equal token ids, labels, masks and pixel values",
        **result,
        "figures": [figure.to_dict() for figure in figures(result)],
    }


def figures(result: dict[str, Any]) -> list[Figure]:
    """Ratios of rates, rates, bytes."""
    in_turn, mapping, workers = result["in_turn"], result["mapping"], result["workers"]
    maps = [one for one in mapping["rounds"] if one["counts"]]
    stored = spread([one["bytes_per_sample"] / 1000 for one in maps])
    return [
        of_spread(
            "on the fly / plain DataLoader",
            spread([one[FLOOR] / one["on the fly"] for one in in_turn]),
            "×",
            at_least=1.0,
        ),
        of_spread(
            f"on the fly / plain DataLoader, {WORKERS} workers each",
            inverse(workers["ratio_to_floor"]["on the fly"]),
            "×",
            at_least=1.0,
        ),
        of_spread(
            "on the fly / datasets.map and one pass", mapping["ratio_to_floor"]["datasets.map"], "×", at_least=5.0
        ),
        of_spread(
            "cache, samples",
            spread([one["samples_per_s"] for one in result["reread"]]),
            "samples/s",
            at_least=LEAST_REREAD,
        ),
        Figure("cache, on disk", result["cache_bytes_per_sample"] / 1000, "kB a sample", MOST_BYTES / 1000),
        *(
            of_spread(name, spread([1000 / one[name] for one in in_turn]), "samples/s")
            for name in ("cache, batches", "on the fly", FLOOR)
        ),
        of_spread("datasets.map alone", spread([result["samples"] / one["map_s"] for one in maps]), "samples/s"),
        of_spread(
            "datasets.map, one pass over it", spread([result["samples"] / one["reread_s"] for one in maps]), "samples/s"
        ),
        of_spread("datasets.map, on disk", stored, "kB a sample"),
    ]
