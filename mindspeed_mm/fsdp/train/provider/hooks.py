"""What a run with functions of the user does around its steps, beside what every run does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from mindspeed_mm.checkpoint.layout import checkpoint_folder
from mindspeed_mm.fsdp.train.provider.objective import ProviderObjective, reduce_reports
from mindspeed_mm.fsdp.train.run.data import Pass
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine


class ReportHook(Hook):
    """Writes down what loss functions reported: the mean over micro-batches and ranks since the last line, of a pair
    the sum divided by the summed divisor.

    Args:
        objective: Keeps the reports.
        record: Writes `metrics.jsonl`.
        interval: Steps between two lines.
        ranks: All of them; None for one process.
    """

    def __init__(
        self, objective: ProviderObjective, record: RunRecord, interval: int, ranks: dist.ProcessGroup | None
    ) -> None:
        self._objective, self._record, self._interval, self._ranks = objective, record, interval, ranks
        self.values: dict[str, float] = {}
        """The latest."""

    @override
    def is_called_at_once(self, engine: TrainEngine, step: int) -> bool:
        return step % self._interval == 0 or step == engine.last_step

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Write when it is time."""
        if not self.is_called_at_once(engine, result.step) and not engine.stopping:
            return
        self.values = reported(self._objective.take_reports(), self._ranks)
        if self.values:
            named = {f"reported/{name}": value for name, value in self.values.items()}
            self._record.metrics({"step": result.step, **named})


def reported(reports: Sequence[dict[str, Any]], ranks: dist.ProcessGroup | None) -> dict[str, float]:
    """The means of what loss functions reported, on all ranks. Ranks may have nothing to report: stages but the last.

    Args:
        reports: Of this rank, one a micro-batch.
        ranks: All of them; None for one process.
    """
    own = reduce_reports(reports)
    everyone = [own]
    if ranks is not None:
        everyone = [own] * dist.get_world_size(ranks)
        dist.all_gather_object(everyone, own, group=ranks)
    sums: dict[str, torch.Tensor] = {}
    for report in everyone:
        for name, number in report.items():
            sums[name] = sums[name] + number if name in sums else number
    means = {}
    for name, number in sums.items():
        total, divisor = number.tolist()
        means[name] = total / divisor if divisor else 0.0
    return means


class SaveLineHook(Hook):
    """Tells of each checkpoint in the words that scripts of older tools look for.

    Args:
        save: The run folder.
        record: Where it is told.
    """

    def __init__(self, save: Path, record: RunRecord) -> None:
        self._save, self._record = save, record

    @override
    def is_called_at_once(self, engine: TrainEngine, step: int) -> bool:
        return False  # where a step is saved, all are

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Tell, where the step's checkpoint is complete; one that is written in the background is told by the run."""
        if checkpoint_folder(self._save, result.step).is_dir():
            line = f"saving checkpoint at iteration {result.step:>7} to {self._save} in torch_dcp format"
            self._record.progress.note(line)


class ArgumentsHook(Hook):
    """Keeps the numbers current that functions of the user read from `get_args()`.

    Args:
        args: The namespace.
    """

    def __init__(self, args: Any) -> None:
        self._args = args

    @override
    def on_train_begin(self, engine: TrainEngine) -> None:
        self._tell(engine)

    @override
    def on_step_launched(self, engine: TrainEngine) -> None:
        self._tell(engine)

    def _tell(self, engine: TrainEngine) -> None:
        self._args.iteration = self._args.curr_iteration = engine.iteration
        self._args.consumed_train_samples = engine.consumed_samples


class AfterStepHook(Hook):
    """Calls functions of the user with the model after each update, as `train(call_backs=…)` asks for.

    Args:
        functions: Called with the model.
    """

    def __init__(self, functions: Sequence[Callable[[Any], object]]) -> None:
        self._functions = tuple(functions)

    @override
    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        for function in self._functions:
            function(engine.model)


class TestSetHook(Hook):
    """Measures the loss on the test set when the run has reached its end.

    Args:
        batches: Makes a pass over the test set.
        record: Where the loss is told and written down.
    """

    __test__ = False  # not a test case, whatever pytest thinks of its name

    def __init__(self, batches: Pass, record: RunRecord) -> None:
        self._batches, self._record = batches, record

    def on_train_end(self, engine: TrainEngine) -> None:
        """Measure, unless the run was stopped before."""
        if engine.iteration < engine.schedule.total_steps:
            return
        losses = {f"test_{name}": value for name, value in engine.validate(self._batches()).items()}
        self._record.metrics({"step": engine.iteration, **losses})
        shown = ", ".join(f"{name.removeprefix('test_')} {value:.4f}" for name, value in losses.items())
        self._record.event("test", engine.iteration, f"step {engine.iteration}: test set {shown}", **losses)

    def on_failure(self, engine: TrainEngine) -> None:
        """Nothing: the error is what is told."""
