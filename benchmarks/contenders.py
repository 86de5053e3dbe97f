"""Starts each contender on the digits workload and brings what it reports into one form.

A report is a list with, for every step: `time` (unix time at its end), `loss`, and the work in it.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.digits import BATCH_SIZE, Workload
from benchmarks.processes import Finished
from benchmarks.turns import Contender

WORK = ("positions", "patches", "tokens", "label_tokens")
LOSS_WITHIN = 1e-3
TIMEOUT_S = 300.0

Report = list[dict[str, Any]]
Measure = Callable[[Finished, Report], dict[str, Any]]


class UnequalWorkError(RuntimeError):
    """Two contenders did not do the same work: their times say nothing."""


@dataclass(frozen=True)
class Contenders:
    """The three of them, on one workload.

    Args:
        workload: Made before.
        steps: Optimizer steps of each run.
        measure: Turns a finished run and its report into what a round keeps.
        preload: Whether the floor has its batches in memory before its first step.
    """

    workload: Workload
    steps: int
    measure: Measure
    preload: bool = False

    def floor(self, *options: str) -> Contender:
        """The bare loop, with further options of it."""
        words = [self.workload.model, self.workload.batches, self.steps, *options]
        if self.preload:
            words.append("--preload")
        return self._contender("benchmarks.bare_loop", words, lambda finished: finished.last_json())

    def trainer(self) -> Contender:
        """Transformers' Trainer, two data workers."""
        data, index = self.workload.folder / "data" / "train.jsonl", self.workload.batches / "index.json"
        out = tempfile.mkdtemp(dir=self.workload.folder)
        words = [self.workload.model, data, index, self.steps, BATCH_SIZE, out]
        return self._contender("benchmarks.hf_trainer", words, lambda finished: finished.last_json())

    def ours(self) -> Contender:
        """`mm train`, two data workers, a run folder with everything that it writes by default."""
        save = Path(tempfile.mkdtemp(dir=self.workload.folder)) / "run"
        options = [f"training.save={save}", f"training.train_iters={self.steps}", "training.save_interval=1000000"]

        def report(_: Finished) -> Report:
            lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            shutil.rmtree(save.parent)
            return self._with_work(lines)

        return self._contender("mindspeed_mm", ["train", self.workload.config, *options], report)

    def _contender(self, module: str, words: Sequence[Any], report: Callable[[Finished], Report]) -> Contender:
        def finish(finished: Finished) -> dict[str, Any]:
            steps = report(finished)
            check_work(steps, self.workload.index()[: self.steps])
            return self.measure(finished, steps)

        return Contender([sys.executable, "-m", module, *map(str, words)], finish)

    def _with_work(self, lines: Sequence[dict[str, Any]]) -> Report:
        """Positions and patches of the batches that our data loader gave, for steps whose tokens and label tokens are
        those of these batches."""
        index = self.workload.index()
        return [
            {"positions": at["positions"], "patches": at["patches"], **line}
            for line, at in zip(lines, index, strict=False)
        ]


def check_work(report: Report, index: Sequence[dict[str, Any]], keys: Sequence[str] = WORK) -> None:
    """Raise `UnequalWorkError` when a step's work is not that of the batches written out."""
    if len(report) != len(index):
        raise UnequalWorkError(f"{len(report)} steps instead of {len(index)}")
    for number, (step, wanted) in enumerate(zip(report, index, strict=True), start=1):
        different = {key: (step[key], wanted[key]) for key in keys if step[key] != wanted[key]}
        if different:
            raise UnequalWorkError(f"step {number} is another batch (here, wanted): {different}")


def check_losses(runs: Sequence[dict[str, Any]]) -> float:
    """Largest relative difference between the first losses of all runs; raises when they are not the same model's."""
    losses = [run["first_loss"] for run in runs]
    difference = (max(losses) - min(losses)) / min(losses)
    if difference > LOSS_WITHIN:
        raise UnequalWorkError(f"first losses differ by {difference:.1e}: {sorted(set(losses))}")
    return difference


def total_work(report: Report) -> dict[str, int]:
    """Work summed over steps."""
    return {key: sum(step[key] for step in report) for key in WORK}
