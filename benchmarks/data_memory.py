"""Memory of each data worker over 20,000 samples, pictures and clips: what it holds for itself alone.

`python -m benchmarks.data_memory FOLDER SAMPLES` is one pass; it prints one JSON line. A straight line is laid through
what each worker held after the first tenth: its rise over 20,000 samples is the figure.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import conversations, processes
from benchmarks.figures import Figure
from benchmarks.rounds import spread

SAMPLES = 20_000
BATCH = 16
WORKERS = 2
TIMEOUT_S = 600.0
TARGET_MB = 8.0
"""A worker holds some hundred; allocators and caches that fill up late move it by a few."""
_WARM_UP = 0.1
_LOOKS = 200


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    found = {kind: measured(kind, work / f"memory-{kind}") for kind in ("pictures", "clips")}
    figures = [figure for kind, result in found.items() for figure in figures_of(kind, result)]
    return {
        "samples": SAMPLES,
        "workers": WORKERS,
        "batch": BATCH,
        "unit": "MB of anonymous memory of a worker's own (RssAnon), by samples that the loader has given",
        "kinds": found,
        "figures": [figure.to_dict() for figure in figures],
    }


def measured(kind: str, folder: Path, samples: int = SAMPLES) -> dict[str, Any]:
    """One pass in a process of its own."""
    conversations.prepare(kind, folder, samples)
    command = [sys.executable, "-m", "benchmarks.data_memory", str(folder), str(samples)]
    result: dict[str, Any] = processes.run(command, timeout_s=TIMEOUT_S).last_json()
    result["rise_mb"] = [rise(result["samples"], held) for held in result["held_mb"]]
    return result


def figures_of(kind: str, result: dict[str, Any]) -> list[Figure]:
    """The worst worker's rise, what it holds, and how fast it went."""
    after = spread([held[-1] for held in result["held_mb"]])
    rises = result["rise_mb"]
    return [
        Figure(f"{kind}: rise of a worker over {SAMPLES} samples", max(rises), "MB", TARGET_MB, min(rises), max(rises)),
        Figure(f"{kind}: a worker holds at the end", after["median"], "MB", None, after["min"], after["max"]),
        Figure(f"{kind}: rate", result["samples_per_s"], "samples/s"),
    ]


def rise(samples: list[int], held_mb: list[float]) -> float:
    """Of the least-squares line after the warm-up, over `SAMPLES`."""
    start = next(i for i, count in enumerate(samples) if count >= _WARM_UP * samples[-1])
    x, y = samples[start:], held_mb[start:]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    return slope * SAMPLES


def own_mb(pid: int) -> float:
    """Anonymous memory that a process holds; what it shares through slots and files is left out."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1000
    raise RuntimeError(f"process {pid} tells no RssAnon")


def main(folder: Path, samples: int) -> None:
    """Read the rows once and watch the workers."""
    from mindspeed_mm.fsdp.data import build_mm_dataloader, build_mm_dataset
    from mindspeed_mm.fsdp.params.data_args import DataloaderParam, DatasetParam

    basic = {"dataset": str(folder / "rows.jsonl"), "dataset_dir": str(folder)}
    param = {"basic_parameters": basic, "preprocess_parameters": {"model_name_or_path": str(folder / "model")}}
    dataset, _ = build_mm_dataset(DatasetParam.model_validate(param))
    loader = build_mm_dataloader(
        dataset,
        DataloaderParam(num_workers=WORKERS),
        micro_batch_size=BATCH,
        gradient_accumulation_steps=1,
        dp_rank=0,
        dp_size=1,
        seed=0,
    )
    steps, every = iter(loader), max(1, samples // BATCH // _LOOKS)
    next(steps)
    workers = sorted(worker.pid or 0 for worker in multiprocessing.active_children())
    counts, held = [], [list[float]() for _ in workers]
    began = time.perf_counter()
    for number in range(1, samples // BATCH):
        next(steps)
        if number % every == 0:
            counts.append((number + 1) * BATCH)
            for pid, mine in zip(workers, held, strict=True):
                mine.append(own_mb(pid))
    rate = (samples // BATCH - 1) * BATCH / (time.perf_counter() - began)
    steps.close()
    print(json.dumps({"samples": counts, "held_mb": held, "samples_per_s": rate}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
