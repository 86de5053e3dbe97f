"""Ways from the same rows to the same batches, in one process: the processor of transformers behind a plain DataLoader,
our loader, our cache, and `datasets.map` with what it stores read again.

`python -m benchmarks.data_contenders FOLDER ROUNDS LIMIT_S` alternates them and prints one JSON line. Nothing is loaded
anew between passes: what is timed is passes over all rows.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import UnequalWorkError
from benchmarks.rounds import ROUGH, Rounds

BATCH = 16
CHECKED = ("input_ids", "attention_mask", "labels", "pixel_values", "image_grid_thw")
WORKERS = 2
FLOOR = "plain DataLoader"
MAPPINGS = 3
FAR_APART = (0.5, 1.0)
"""The rule of rounds whose contenders are several times as slow as the floor."""


class Contenders:
    """All of them, on the rows of a folder of `conversations`.

    Args:
        folder: The workload.
    """

    def __init__(self, folder: Path) -> None:
        from benchmarks.hf_trainer import ProcessorCollator  # imports transformers' Trainer: seconds
        from mindspeed_mm.fsdp.utils.processor import load_processor

        self._folder = folder
        self._collate = ProcessorCollator(load_processor(folder / "model"), folder)
        lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
        self._rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self._random = random.Random(0)

    def plain(self, workers: int = 0) -> dict[str, Any]:
        """A DataLoader whose collator asks the processor."""
        return self._timed(self.plain_batches(workers))

    def ours(self, workers: int = 0) -> dict[str, Any]:
        """Our loader, on the fly."""
        return self._timed(self.our_batches(workers))

    def cache(self) -> dict[str, Any]:
        """Samples of our cache, each read once in random order."""
        order = self._random.sample(range(len(self._rows)), len(self._rows))
        return self._timed({"sample_ids": [self.cached[row]["sample_id"]]} for row in order)

    def in_turn(self) -> dict[str, float]:
        """One pass over all rows, ms a sample by each way. They take turns batch by batch, so that a machine that is
        slow for a moment is slow for all of them."""
        ways = {
            FLOOR: iter(self.plain_batches(0)),
            "on the fly": iter(self.our_batches(0)),
            "cache, batches": iter(self.our_batches(0, self.cached)),
        }
        seconds = dict.fromkeys(ways, 0.0)
        for _ in range(len(self._rows) // BATCH):
            for name, batches in ways.items():
                began = time.perf_counter()
                next(batches)
                seconds[name] += time.perf_counter() - began
        return {name: 1000 * total / len(self._rows) for name, total in seconds.items()}

    def mapped(self) -> dict[str, Any]:
        """`datasets.map` in batches, then one pass over what it stored."""
        scratch = self._folder / "mapped"
        began = time.perf_counter()
        stored = self._map(scratch)
        map_s = time.perf_counter() - began
        result = self._timed(_reread(stored))
        disk = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
        shutil.rmtree(scratch)
        seconds = map_s + result["seconds"]
        return {
            "value": 1000 * seconds / len(self._rows),
            "seconds": seconds,
            "map_s": map_s,
            "reread_s": result["seconds"],
            "bytes_per_sample": disk / len(self._rows),
        }

    def cache_bytes(self) -> float:
        """Of the cache on disk, a sample; settings and tables included."""
        files = [path for path in (self._folder / "cache").rglob("*") if path.is_file()]
        return sum(path.stat().st_size for path in files) / len(self._rows)

    def check_equal(self) -> None:
        """Raise `UnequalWorkError` unless all give the same numbers, batch for batch."""
        ways: dict[str, Iterable[dict[str, Any]]] = {
            "our loader": self.our_batches(0),
            "our loader with workers": self.our_batches(WORKERS),
            "our cache": self.our_batches(0, self.cached),
        }
        for name, batches in ways.items():
            check_batches(name, batches, self.plain_batches(0))

    # --- batches -----------------------------------------------------------------------------------------------------

    def plain_batches(self, workers: int) -> Iterable[dict[str, Any]]:
        """As a user of the DataLoader writes it."""
        from torch.utils.data import DataLoader

        return DataLoader(self._rows, batch_size=BATCH, num_workers=workers, collate_fn=self._collate)  # type: ignore[arg-type]

    def our_batches(self, workers: int, dataset: Any = None) -> Iterable[dict[str, Any]]:
        """`build_mm_dataloader`, rows in order, one epoch."""
        from mindspeed_mm.fsdp.data import build_mm_dataloader
        from mindspeed_mm.fsdp.params.data_args import DataloaderParam

        loader = build_mm_dataloader(
            dataset or self.on_the_fly,
            DataloaderParam(sampler_type="SequentialSampler", num_workers=workers),
            micro_batch_size=BATCH,
            gradient_accumulation_steps=1,
            dp_rank=0,
            dp_size=1,
            seed=0,
        )
        steps = iter(loader)
        for _ in range(len(self._rows) // BATCH):
            [batch] = next(steps)
            yield batch

    @cached_property
    def on_the_fly(self) -> Any:
        """Our data set."""
        from mindspeed_mm.fsdp.data import build_mm_dataset

        return build_mm_dataset(self._param(preprocess_on_fly=True))[0]

    @cached_property
    def cached(self) -> Any:
        """Our data set, encoded up front."""
        from mindspeed_mm.fsdp.data import build_mm_dataset

        return build_mm_dataset(self._param(preprocess_on_fly=False))[0]

    def _param(self, **basic: Any) -> Any:
        from mindspeed_mm.fsdp.params.data_args import DatasetParam

        folder = str(self._folder)
        rows = {"dataset": f"{folder}/rows.jsonl", "dataset_dir": folder, "cache_dir": f"{folder}/cache"}
        return DatasetParam.model_validate(
            {"basic_parameters": rows | basic, "preprocess_parameters": {"model_name_or_path": f"{folder}/model"}}
        )

    def _map(self, scratch: Path) -> Any:
        import datasets

        datasets.disable_progress_bars()
        scratch.mkdir()
        names = list(self._rows[0])
        return datasets.Dataset.from_list(self._rows).map(
            partial(_as_lists, self._collate, names),
            batched=True,
            batch_size=BATCH,
            remove_columns=names,
            cache_file_name=str(scratch / "mapped.arrow"),
            new_fingerprint=f"pass{time.monotonic_ns()}",
        )

    def _timed(self, batches: Iterable[dict[str, Any]]) -> dict[str, Any]:
        began, samples = time.perf_counter(), 0
        for batch in batches:
            samples += len(batch["sample_ids"] if "sample_ids" in batch else batch["input_ids"])
        seconds = time.perf_counter() - began
        if samples != len(self._rows):
            raise UnequalWorkError(f"{samples} samples instead of {len(self._rows)}")
        return {"value": 1000 * seconds / samples, "seconds": seconds, "samples_per_s": samples / seconds}


def check_batches(name: str, ours: Iterable[dict[str, Any]], plain: Iterable[dict[str, Any]]) -> None:
    """Raise `UnequalWorkError` when a batch has other numbers."""
    import torch

    for number, (mine, other) in enumerate(zip(ours, plain, strict=True)):
        for key in CHECKED:
            if not torch.equal(mine[key], other[key]):
                raise UnequalWorkError(f"{name}: {key} of batch {number} is another than the processor's")


def _as_lists(collate: Callable[[list[dict[str, Any]]], dict[str, Any]], names: Sequence[str], columns: Any) -> Any:
    """What a user of `datasets.map` stores: a row's own tokens and patches."""
    rows = [dict(zip(names, values, strict=True)) for values in zip(*(columns[name] for name in names), strict=True)]
    batch = collate(rows)
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    patches = batch["image_grid_thw"].prod(dim=1).tolist()
    return {
        "input_ids": [ids[:n].numpy() for ids, n in zip(batch["input_ids"], lengths, strict=True)],
        "labels": [ids[:n].numpy() for ids, n in zip(batch["labels"], lengths, strict=True)],
        "pixel_values": [part.numpy() for part in batch["pixel_values"].split(patches)],
        "image_grid_thw": list(batch["image_grid_thw"].numpy()),
    }


def _reread(stored: Any) -> Iterable[dict[str, Any]]:
    """Batches of tensors out of what was stored, by the library's own torch format."""
    return stored.with_format("torch").iter(batch_size=BATCH)


def main(folder: Path, rounds: int, limit_s: float) -> None:
    """Check, alternate, print."""
    contenders = Contenders(folder)
    contenders.check_equal()
    in_turn = [contenders.in_turn() for _ in range(rounds)]
    reread = [contenders.cache() for _ in range(rounds)]
    mapping = Rounds(contenders.ours, {"datasets.map": contenders.mapped}, *FAR_APART)
    mapping.measure(MAPPINGS, limit_s)
    workers = Rounds(partial(contenders.plain, WORKERS), {"on the fly": partial(contenders.ours, WORKERS)}, *ROUGH)
    workers.measure(rounds, limit_s)
    print(
        json.dumps(
            {
                "samples": len(contenders._rows),
                "cache_bytes_per_sample": contenders.cache_bytes(),
                "in_turn": in_turn,
                "reread": reread,
                "mapping": mapping.summary(),
                "workers": workers.summary(),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
