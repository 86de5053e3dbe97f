"""Samples a second of `mm extract`, reading, decoding and writing included, over a bare loop of the same encoders.

The bare loop's pixels and token ids lie ready in memory, and it writes nothing; both encode in fp32, on one thread, in
the same batches. The rate is that between the first batch and the last; start-up is told apart.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import UnequalWorkError
from benchmarks.figures import Figure, of_spread
from benchmarks.processes import Finished
from benchmarks.processes import run as run_process
from benchmarks.raw_media import CLIPS, PICTURES, Kind, Workload, prepare
from benchmarks.rounds import spread
from benchmarks.turns import FLOOR, Contender, Turns

ROUNDS = 6
TIMEOUT_S = 300.0
TARGET = 0.95
MEANS_WITHIN = 1e-4


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    kinds = {kind.name: measured(kind, work / kind.name) for kind in (PICTURES, CLIPS)}
    shown = [figure for name, result in kinds.items() for figure in figures(name, result)]
    return {
        "precision": "fp32",
        "unit": "ms a sample, from the end of the first batch to the end of the last",
        "kinds": kinds,
        "figures": [figure.to_dict() for figure in shown],
    }


def measured(kind: Kind, folder: Path, samples: int | None = None) -> dict[str, Any]:
    """The rounds of one kind of media."""
    contenders = Contenders(prepare(kind, folder, samples))
    contenders.check_features()
    turns = Turns(contenders.floor, {"mm extract": contenders.ours}, TIMEOUT_S)
    turns.measure(ROUNDS)
    return {
        "samples": contenders.workload.samples,
        "batch": kind.batch_size,
        "stored": kind.stored,
        "encoded": kind.sizes,
        **turns.summary(),
    }


@dataclass(frozen=True)
class Contenders:
    """The bare loop and `mm extract`, on one workload."""

    workload: Workload

    def floor(self) -> Contender:
        """The bare loop."""
        return Contender(self._bare_command(), lambda finished: self._finish(finished, finished.last_json()["batches"]))

    def ours(self) -> Contender:
        """`mm extract` into an empty folder, at its defaults but for the batch size."""
        scratch = Path(tempfile.mkdtemp(dir=self.workload.folder))

        def finish(finished: Finished) -> dict[str, Any]:
            batches = json.loads((scratch / "times.json").read_text(encoding="utf-8"))
            shutil.rmtree(scratch)
            return self._finish(finished, batches)

        return Contender(self._extract_command(scratch), finish)

    def check_features(self) -> None:
        """Raise `UnequalWorkError` when the two do not make the same features."""
        scratch = Path(tempfile.mkdtemp(dir=self.workload.folder))
        run_process(self._extract_command(scratch), timeout_s=TIMEOUT_S)
        words = ["means", str(scratch / "features"), str(self.workload.model)]
        found = run_process([sys.executable, "-m", "benchmarks.timed_extract", *words], timeout_s=TIMEOUT_S)
        bare = run_process(self._bare_command(), timeout_s=TIMEOUT_S)
        check_means(found.last_json(), bare.last_json()["means"])
        shutil.rmtree(scratch)

    def _bare_command(self) -> list[str]:
        workload = self.workload
        words = [workload.kind.family, workload.model, workload.inputs, workload.kind.batch_size]
        return [sys.executable, "-m", "benchmarks.bare_encoders", *map(str, words)]

    def _extract_command(self, scratch: Path) -> list[str]:
        times, batch = scratch / "times.json", str(self.workload.kind.batch_size)
        features = f"data.dataset_param.basic_parameters.features_dir={scratch / 'features'}"
        words = ["run", str(times), str(self.workload.config), features, "--batch-size", batch]
        return [sys.executable, "-m", "benchmarks.timed_extract", *words]

    def _finish(self, finished: Finished, batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
        samples = sum(batch["samples"] for batch in batches)
        if samples != self.workload.samples:
            raise UnequalWorkError(f"{samples} samples instead of {self.workload.samples}")
        first, last = batches[0], batches[-1]
        begin_s, end_s = finished.ran_s(first["time"]), finished.ran_s(last["time"])
        seconds, counted = end_s - begin_s, samples - first["samples"]
        return {
            "value": 1000 * seconds / counted,
            "samples_per_s": counted / seconds,
            "start_up_s": begin_s,
            "finish_s": finished.wall_s - end_s,
            "total_s": finished.wall_s,
            "peak_rss_mb": finished.peak_rss_mb,
        }


def check_means(ours: dict[str, list[float]], bare: dict[str, list[float]]) -> None:
    """Raise `UnequalWorkError` when the mean absolute feature of a row is another."""
    for name, wanted in bare.items():
        if len(ours[name]) != len(wanted):
            raise UnequalWorkError(f"{name}: {len(ours[name])} rows instead of {len(wanted)}")
        for row, (mean, other) in enumerate(zip(ours[name], wanted, strict=True), start=1):
            if abs(mean - other) > MEANS_WITHIN * abs(other):
                raise UnequalWorkError(f"{name} of row {row} are other features: mean {mean} instead of {other}")


def figures(name: str, result: dict[str, Any]) -> list[Figure]:
    """Rates, and what start-up adds."""
    ours, bare = ([one[who] for one in result["rounds"]] for who in ("mm extract", FLOOR))
    ratio = inverse(result["ratio_to_floor"]["mm extract"])
    told = [
        ("samples_per_s", "", "samples/s"),
        ("start_up_s", ", start to the end of the first batch", "s"),
        ("finish_s", ", end of the last batch to the end", "s"),
        ("total_s", ", whole process", "s"),
    ]
    return [
        of_spread(f"{name}: mm extract / bare loop, samples/s", ratio, "×", at_least=TARGET),
        *(
            of_spread(f"{name}: {who}{what}", spread([one[key] for one in runs]), unit)
            for who, runs in (("mm extract", ours), ("bare loop", bare))
            for key, what, unit in told
        ),
    ]


def inverse(times: dict[str, Any]) -> dict[str, Any]:
    """A spread of times as that of rates."""
    if not times["n"]:
        return times
    return {"median": 1 / times["median"], "min": 1 / times["max"], "max": 1 / times["min"], "n": times["n"]}
