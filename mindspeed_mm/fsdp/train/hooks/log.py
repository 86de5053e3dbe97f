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
        """Take the bar away."""
        self._record.progress.end_steps()

    def _summary(self, engine: TrainEngine, result: StepResult) -> dict[str, float]:
        seconds = sum(r.seconds for r in self._window)
        tokens = sum(r.tally.tokens for r in self._window)
        slots = sum(r.tally.slots for r in self._window)
        samples = sum(r.tally.samples for r in self._window)
        done = result.step - self._first_step
        # By the wall clock: validation and saves are part of the time left, though not of a step's.
        pace = (time.perf_counter() - self._begun) / done
        losses = {name: value for name, value in result.losses.items() if not is_measured(name)}
        terms = {f"loss/{name}": value for name, value in losses.items()} if len(losses) > 1 else {}
        terms |= {name: value for name, value in result.losses.items() if name not in losses}
        return {
            "step": result.step,
            "loss": result.loss,
            **terms,
            **(self._media.take_metrics() if self._media is not None else {}),
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            **({"loss_scale": result.loss_scale} if result.loss_scale is not None else {}),
            "tokens_per_s": tokens / seconds,
            "samples_per_s": samples / seconds,
            "step_ms": 1000 * seconds / len(self._window),
            **self._use_of_devices(seconds),
            "data_share": sum(r.data_seconds for r in self._window) / seconds,
            **_peak_memory(),
            "tokens": tokens,
            **({"useful": tokens / slots} if slots else {}),
            **(self._loader.take_metrics() if self._loader is not None else {}),
            "label_tokens": sum(r.tally.label_tokens for r in self._window),
            "samples": samples,
            "global_batch": result.tally.samples,
            "consumed_samples": engine.consumed_samples,
            "eta_s": pace * (engine.last_step - result.step),
        }

    def _use_of_devices(self, seconds: float) -> dict[str, float]:
        if self._utilisation is None:
            return {}
        return self._utilisation.metrics([result.tally.flops for result in self._window], seconds)


def _peak_memory() -> dict[str, float]:
    """Of this rank, since the last line."""
    peak = take_peak_memory()
    reserved = {} if peak.reserved is None else {"memory_reserved_gib": peak.reserved / GIB}
    return {"memory_gib": peak.allocated / GIB, **reserved}
