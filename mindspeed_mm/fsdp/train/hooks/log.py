"""What a run tells of its steps: the log line, which adds steps up; at the end of each epoch and of the run what became
of the samples; after its last step losses, time, where it lies, the next command.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from typing_extensions import override

from mindspeed_mm.checkpoint.choice import best_of
from mindspeed_mm.checkpoint.layout import list_iterations
from mindspeed_mm.core.terminal import quoted
from mindspeed_mm.fsdp.data.data_utils.rows.row_fields import unread_told
from mindspeed_mm.fsdp.data.dataloader.dataloader import DataCounts
from mindspeed_mm.fsdp.distributed.towers.media import MediaSharing
from mindspeed_mm.fsdp.loss.objectives import is_measured
from mindspeed_mm.fsdp.train.run.data import RunLoader
from mindspeed_mm.fsdp.train.run.failures import shortened
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.train.run.utilisation import Utilisation
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine
from mindspeed_mm.fsdp.utils.device import take_peak_memory
from mindspeed_mm.fsdp.utils.work_progress import clock

GIB = 2**30


def log_hook(parts: RunParts) -> Hook:
    """The hook, which every run has."""
    interval, assembled = parts.arguments.training.log_interval, parts.assembled
    return LogHook(parts.record, interval, assembled.utilisation, assembled.applied.media, parts.loader)


class LogHook(Hook):
    """Adds up steps and, every `log_interval`, tells people and machines how it goes.

    Args:
        record: Writes `metrics.jsonl`; shows the lines and the bar that people see.
        log_interval: Steps between two lines.
        utilisation: Knows the FLOPs of steps and the peak of devices.
        media: Towers that share media, which know how evenly.
        loader: Knows how evenly work was planned over ranks.
    """

    def __init__(
        self,
        record: RunRecord,
        log_interval: int,
        utilisation: Utilisation | None = None,
        media: MediaSharing | None = None,
        loader: RunLoader | None = None,
    ) -> None:
        self._utilisation, self._media, self._loader = utilisation, media, loader
        self._record = record
        self._interval = log_interval
        self._window: list[StepResult] = []
        self._taken: _TakenNumbers | None = None
        """For the line of the step that was launched last, where it has one."""
        self._begun, self._first_step = time.perf_counter(), 0

    def on_train_begin(self, engine: TrainEngine) -> None:
        """Start the clock of the time left."""
        self._begun, self._first_step = time.perf_counter(), engine.iteration

    def is_called_at_once(self, engine: TrainEngine, step: int) -> bool:
        """A line may come late: what the next step changes is taken before."""
        return False

    def on_step_launched(self, engine: TrainEngine) -> None:
        """Take what is counted since the last line, before the next step adds to it; what is noted from now on is noted
        after this step."""
        self._record.step = engine.iteration
        if self._has_line(engine, engine.iteration):
            self._taken = self._take()

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Log the window of steps since the last line."""
        self._window.append(result)
        if result.skipped:
            self._record.note(f"warning: {result.skipped}", result.step)
        if self._has_line(engine, result.step):
            self._log(engine, result)

    def _has_line(self, engine: TrainEngine, step: int) -> bool:
        last = step == engine.last_step or engine.stopping
        return last or step % self._interval == 0 or step == self._first_step + 1

    def _take(self) -> _TakenNumbers:
        return _TakenNumbers(
            media=self._media.take_metrics() if self._media is not None else {},
            memory=_peak_memory(),
            loader=self._loader.take_metrics() if self._loader is not None else {},
        )

    def _log(self, engine: TrainEngine, result: StepResult) -> None:
        taken, self._taken = self._taken or self._take(), None
        metrics = self._summary(engine, result, taken)
        self._window.clear()
        self._record.progress.step(metrics, engine.last_step, engine.schedule.total_steps)
        self._record.metrics(metrics)

    def on_train_end(self, engine: TrainEngine) -> None:
        """Log what is left where another hook has ended the run, and take the bar away."""
        if self._window:
            self._log(engine, self._window[-1])
        self._record.progress.end_steps()

    def on_failure(self, engine: TrainEngine) -> None:
        """Take the progress bar away; steps since the last line are not logged."""
        self._record.progress.end_steps()

    def _summary(self, engine: TrainEngine, result: StepResult, taken: _TakenNumbers) -> dict[str, float]:
        seconds = data_seconds = 0.0
        tokens = slots = samples = label_tokens = 0
        for each in self._window:
            seconds += each.seconds
            data_seconds += each.data_seconds
            tokens += each.tally.tokens
            slots += each.tally.slots
            samples += each.tally.samples
            label_tokens += each.tally.label_tokens
        done = result.step - self._first_step
        # By the wall clock: validation and saves are part of the time left, though not of a step's.
        pace = (time.perf_counter() - self._begun) / done
        # The order of the names is that of the table and of the records.
        metrics = {"step": result.step, "loss": result.loss, **_terms(result), **taken.media}
        metrics |= {"grad_norm": result.grad_norm, "lr": result.lr}
        if result.loss_scale is not None:
            metrics["loss_scale"] = result.loss_scale
        metrics |= {
            "tokens_per_s": tokens / seconds,
            "samples_per_s": samples / seconds,
            "step_ms": 1000 * seconds / len(self._window),
        }
        metrics |= self._use_of_devices(seconds)
        metrics["data_share"] = data_seconds / seconds
        metrics |= taken.memory
        metrics["tokens"] = tokens
        if slots:
            metrics["useful"] = tokens / slots
        return metrics | {
            **taken.loader,
            "label_tokens": label_tokens,
            "samples": samples,
            "global_batch": result.tally.samples,
            "consumed_samples": engine.consumed_samples,
            "eta_s": pace * (engine.last_step - result.step),
        }

    def _use_of_devices(self, seconds: float) -> dict[str, float]:
        if self._utilisation is None:
            return {}
        return self._utilisation.metrics([result.tally.flops for result in self._window], seconds)


class _TakenNumbers(NamedTuple):
    """What is counted from line to line, and not step by step."""

    media: dict[str, float]
    memory: dict[str, float]
    loader: dict[str, float]


def _terms(result: StepResult) -> dict[str, float]:
    """The terms of a loss that has several, and what is measured beside the loss."""
    minimised, measured = {}, {}
    for name, value in result.losses.items():
        if is_measured(name):
            measured[name] = value
        else:
            minimised[f"loss/{name}"] = value
    if len(minimised) == 1:
        return measured
    return minimised | measured


def _peak_memory() -> dict[str, float]:
    """Of this rank, since the last line."""
    peak = take_peak_memory()
    metrics = {"memory_gib": peak.allocated / GIB}
    if peak.reserved is not None:
        metrics["memory_reserved_gib"] = peak.reserved / GIB
    return metrics


# --- samples ----------------------------------------------------------------------------------------------------------


def data_hook(parts: RunParts) -> Hook:
    """The hook, which every run has."""
    return DataHook(parts.loader, parts.job.data_group, parts.record)


class DataHook(Hook):
    """Tells, at the end of each epoch and of the run, which samples could not be used as they stand.

    Args:
        loader: Counts on this rank; the counts of all ranks are told.
        group: Ranks that hold different samples; None for one process.
        record: Where the counts are told and written down.
    """

    def __init__(self, loader: RunLoader, group: dist.ProcessGroup | None, record: RunRecord) -> None:
        self._loader, self._group, self._record = loader, group, record
        self._epoch = loader.position.epoch

    @override
    def is_called_at_once(self, engine: TrainEngine, step: int) -> bool:
        return self._loader.untold_bad_samples > 0 or self._loader.position.epoch != self._epoch

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Ranks tell each other of bad samples, so that all of them stop or none."""
        if result.tally.bad_samples:
            found = _bad_samples(self._over_ranks())
            self._loader.learn_bad_samples(found)

    def before_next_step(self, engine: TrainEngine) -> None:
        """Tell people when an epoch is over."""
        if self._loader.position.epoch != self._epoch:
            self._epoch = self._loader.position.epoch
            self._tell(engine)

    def on_train_end(self, engine: TrainEngine) -> None:
        """Tell of the whole run."""
        self._tell(engine)

    def on_failure(self, engine: TrainEngine) -> None:
        """Nothing: the other ranks may not be there to ask."""

    def _tell(self, engine: TrainEngine) -> None:
        if (mix := self._loader.mix) is not None:
            shares = mix.achieved()
            shown = ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
            self._record.event("mix", engine.iteration, f"mix since this start: {shown}", shares=shares)
        counts = self._over_ranks()
        bad = _bad_samples(counts)
        shrunk = sum(each.shrunk for each in counts)
        too_long = sum(each.too_long for each in counts)
        unread = sum((each.unread for each in counts), Counter[str]())
        if unread:
            line = unread_told(unread, f"{sum(each.read for each in counts):,} samples so far")
            self._record.event("unread", engine.iteration, f"data: {line}", unread=dict(unread))
        if not (bad or shrunk or too_long):
            return
        line = (
            f"data so far: {len(bad)} bad samples were replaced or left out, {too_long} too long ones too, "
            f"{shrunk} were shortened"
        )
        if bad:
            line += f"; {shortened([f'{sample} ({reason})' for sample, reason in bad.items()], most=3)}"
        self._record.event("data", engine.iteration, line, bad=bad, shrunk=shrunk, too_long=too_long)

    def _over_ranks(self) -> list[DataCounts]:
        if self._group is None:
            return [self._loader.counts]
        gathered = [self._loader.counts] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, self._loader.counts, group=self._group)
        return gathered


def _bad_samples(counts: Sequence[DataCounts]) -> dict[str, str]:
    """Sample → reason, of all ranks."""
    bad: dict[str, str] = {}
    for each in counts:
        bad |= each.bad
    return bad


# --- the end of a run -------------------------------------------------------------------------------------------------


def summary_hook(parts: RunParts) -> Hook:
    """The hook, which every run has."""
    folder = parts.arguments.model.model_name_or_path
    options = None
    if folder and _answers_or_draws(Path(folder)):
        options = parts.family.trial_options(parts.assembled.model)
    return SummaryHook(parts.record.progress.note, parts.arguments.training.save, options)


def _answers_or_draws(folder: Path) -> bool:
    """Whether a model's folder has what a question is read by, or draws: an own module's has neither."""
    return (folder / "model_index.json").is_file() or any(folder.glob("token*")) or any(folder.glob("*processor*"))


class SummaryHook(Hook):
    """Keeps the lowest and the last loss of this start, and tells them when training ends.

    Args:
        note: Tells people.
        save: The run folder.
        trial_options: Options of `mm infer` that try the trained model; None where it cannot be tried so.
    """

    def __init__(self, note: Callable[[str], None], save: str | None, trial_options: str | None) -> None:
        self._note, self._save, self._trial_options = note, save, trial_options
        # (step, loss); step 0 is none.
        self._last = self._lowest = self._last_validation = self._lowest_validation = (0, math.inf)
        self._began = time.monotonic()

    @override
    def on_train_begin(self, engine: TrainEngine) -> None:
        self._began = time.monotonic()

    @override
    def is_called_at_once(self, engine: TrainEngine, step: int) -> bool:
        return False

    @override
    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        self._last = (result.step, result.loss)
        self._lowest = min(self._lowest, self._last, key=lambda pair: pair[1])
        if engine.validated_step == result.step and "val_loss" in engine.validation:
            self._last_validation = (result.step, engine.validation["val_loss"])
            self._lowest_validation = min(self._lowest_validation, self._last_validation, key=lambda pair: pair[1])

    def on_train_end(self, engine: TrainEngine) -> None:
        """Tell how it went; nothing where no step was done."""
        if not self._last[0]:
            return
        took = clock(time.monotonic() - self._began)
        self._note(f"done   step {engine.iteration} of {engine.schedule.total_steps}, {took} for this start")
        self._note(f"loss   {_loss_words(self._last, self._lowest)}")
        if self._last_validation[0]:
            self._note(f"valid  {_loss_words(self._last_validation, self._lowest_validation)}")
        if self._save is None:
            self._note("run    nothing was saved: training.save is not set")
            return
        steps = list_iterations(Path(self._save))
        if not steps:
            self._note(f"run    {self._save}, no checkpoint")
            return
        best = best_of(Path(self._save))
        told = f"newest checkpoint {steps[-1]}"
        if best is not None and best[0] != steps[-1]:
            told += f"; mm infer and mm export use the best, step {best[0]} ({best[1]}): --checkpoint newest"
        self._note(f"run    {self._save}, {told}")
        run = quoted(self._save)
        trial = ""
        if self._trial_options:
            trial = f"mm infer {run} {self._trial_options}; mm export {run} FOLDER; "
        self._note(f"next   {trial}mm report {run}")

    def on_failure(self, engine: TrainEngine) -> None:
        """Nothing: the error says what to do."""


def _loss_words(last: tuple[int, float], lowest: tuple[int, float]) -> str:
    """`final 0.1234, lowest 0.1200 at step 380`; no lowest where no loss was finite."""
    told = f"final {last[1]:.4f}"
    if lowest[0] and lowest != last:
        told += f", lowest {lowest[1]:.4f} at step {lowest[0]}"
    return told
