"""The log line: adds up steps and, every `log_interval`, tells people and machines how it goes."""

from __future__ import annotations

import time

from mindspeed_mm.fsdp.distributed.towers.media import MediaSharing
from mindspeed_mm.fsdp.loss.objectives import is_measured
from mindspeed_mm.fsdp.train.run.data import RunLoader
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.train.run.utilisation import Utilisation
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine
from mindspeed_mm.fsdp.utils.device_memory import take_peak_memory

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
        self._begun, self._first_step = time.perf_counter(), 0

    def on_train_begin(self, engine: TrainEngine) -> None:
        """Start the clock of the time left."""
        self._begun, self._first_step = time.perf_counter(), engine.iteration

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Log the window of steps since the last line."""
        self._window.append(result)
        if result.skipped:
            self._record.note(f"warning: {result.skipped}", result.step)
        last = result.step == engine.last_step or engine.stopping
        if result.step % self._interval and not last and result.step != self._first_step + 1:
            return
        self._log(engine, result)

    def _log(self, engine: TrainEngine, result: StepResult) -> None:
        metrics = self._summary(engine, result)
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

    def _summary(self, engine: TrainEngine, result: StepResult) -> dict[str, float]:
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
        metrics = {"step": result.step, "loss": result.loss, **_terms(result)}
        if self._media is not None:
            metrics |= self._media.take_metrics()
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
        metrics |= _peak_memory()
        metrics["tokens"] = tokens
        if slots:
            metrics["useful"] = tokens / slots
        if self._loader is not None:
            metrics |= self._loader.take_metrics()
        return metrics | {
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


def _terms(result: StepResult) -> dict[str, float]:
    """The terms of a loss that has several, and what is measured beside the loss."""
    minimised, measured = {}, {}
    for name, value in result.losses.items():
        if is_measured(name):
            measured[name] = value
        else:
            minimised[f"loss/{name}"] = value
    return measured if len(minimised) == 1 else minimised | measured


def _peak_memory() -> dict[str, float]:
    """Of this rank, since the last line."""
    peak = take_peak_memory()
    metrics = {"memory_gib": peak.allocated / GIB}
    if peak.reserved is not None:
        metrics["memory_reserved_gib"] = peak.reserved / GIB
    return metrics
