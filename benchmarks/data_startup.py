"""From process start to the first batch on a million rows of JSONL, each with a picture; nothing is kept between runs.

`python -m benchmarks.data_startup FOLDER SAMPLER ROWS PACKING` is one start; it prints one JSON line. Files are in the
page cache, as are the interpreter's and the libraries'. Beside it stands what a user writes without us: every line
parsed, transformers' processor, a DataLoader.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import conversations, processes
from benchmarks.figures import Figure, of_spread
from benchmarks.rounds import spread

ROWS = 1_000_000
ROUNDS = 5
TIMEOUT_S = 120.0
TARGET_S = 5.0
PLAIN = "plain DataLoader"
WAYS = {"random order": ("BaseRandomBatchSampler", "16", "false"), "packed": ("TokenBudgetSampler", "1", "true")}
"""Sampler, rows of a micro-batch, packing."""


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    folder = work / "million"
    rows = conversations.prepare("pictures", folder, ROWS)
    starts: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    ways = {PLAIN: ("plain",), **WAYS}
    starts[PLAIN] = []
    for _ in range(ROUNDS):
        for name, words in ways.items():
            starts[name].append(start(folder, *words))
            print(f"  {name}: {starts[name][-1]['value']:.2f} s", flush=True)
    figures = [figure for name in WAYS for figure in figures_of(name, starts[name])]
    figures.append(of_spread(f"{PLAIN}: start to first batch", spread([one["value"] for one in starts[PLAIN]]), "s"))
    return {
        "rows": ROWS,
        "file_bytes": rows.stat().st_size,
        "unit": "s, from process start to the first batch in the trainer's hands; two workers",
        "starts": starts,
        "figures": [figure.to_dict() for figure in figures],
    }


def start(folder: Path, *words: str) -> dict[str, Any]:
    """One process."""
    command = [sys.executable, "-m", "benchmarks.data_startup", str(folder), *words]
    finished = processes.run(command, timeout_s=TIMEOUT_S)
    told = finished.last_json()
    return {"value": told.pop("time") - finished.started, **told, "peak_rss_mb": finished.peak_rss_mb}


def figures_of(name: str, runs: list[dict[str, Any]]) -> list[Figure]:
    """The whole, and its parts."""
    whole = of_spread(f"{name}: start to first batch", spread([one["value"] for one in runs]), "s", TARGET_S)
    parts = ("data_set", "fingerprint", "first_batch")
    return [whole] + [of_spread(f"{name}: {part}", spread([one[f"{part}_s"] for one in runs]), "s") for part in parts]


def main(folder: Path, sampler: str, rows: str, packing: str) -> None:
    """Build everything as `mm train` does, which leaves garbage until training runs, and time its parts."""
    gc.disable()
    from mindspeed_mm.fsdp.data import build_mm_dataloader, build_mm_dataset
    from mindspeed_mm.fsdp.params.data_args import DataloaderParam, DatasetParam

    laps = [time.perf_counter()]
    basic = {"dataset": str(folder / "rows.jsonl"), "dataset_dir": str(folder), "packing": packing == "true"}
    param = {"basic_parameters": basic, "preprocess_parameters": {"model_name_or_path": str(folder / "model")}}
    dataset, _ = build_mm_dataset(DatasetParam.model_validate(param))
    laps.append(time.perf_counter())
    dataset.fingerprint()
    laps.append(time.perf_counter())
    loader = build_mm_dataloader(
        dataset,
        DataloaderParam(sampler_type=sampler, num_workers=2),
        micro_batch_size=int(rows),
        gradient_accumulation_steps=1,
        dp_rank=0,
        dp_size=1,
        seed=0,
    )
    steps = iter(loader)
    [batch] = next(steps)
    laps.append(time.perf_counter())
    done = time.time()
    names = ("data_set_s", "fingerprint_s", "first_batch_s")  # the first with the import of transformers
    parts = {name: after - before for name, before, after in zip(names, laps, laps[1:], strict=False)}
    steps.close()
    print(json.dumps({"time": done, **parts, "tokens": batch["input_ids"].numel(), "rows": len(dataset)}))


def main_plain(folder: Path) -> None:
    """The same batch as a user of the DataLoader comes by it."""
    from torch.utils.data import DataLoader

    from benchmarks.hf_trainer import ProcessorCollator
    from mindspeed_mm.fsdp.utils.processor import load_processor

    with (folder / "rows.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    collate = ProcessorCollator(load_processor(folder / "model"), folder)
    batch = next(iter(DataLoader(rows, batch_size=16, shuffle=True, num_workers=2, collate_fn=collate)))  # type: ignore[arg-type]
    print(json.dumps({"time": time.time(), "tokens": batch["input_ids"].numel(), "rows": len(rows)}), flush=True)


if __name__ == "__main__":
    if sys.argv[2] == "plain":
        main_plain(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), *sys.argv[2:])
