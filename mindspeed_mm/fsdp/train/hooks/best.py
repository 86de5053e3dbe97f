"""The best checkpoint of a run, kept beside the newest ones, and the end of a run that no longer gets better."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mindspeed_mm.checkpoint.layout import checkpoint_folder
from mindspeed_mm.core.artifacts import RunFolder, atomic_write_text
from mindspeed_mm.core.json_file import JsonObject, parse_json
from mindspeed_mm.core.model_kinds import UNIFIED
from mindspeed_mm.fsdp.checkpoint.manager import CheckpointManager
from mindspeed_mm.fsdp.loss.drawn_pictures import draws_pictures
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.params.evaluate_args import EvaluateArguments
from mindspeed_mm.fsdp.train.hooks.checkpoint import CheckpointHook
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.run.random_state import capture_rng, restore_rng
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine
from mindspeed_mm.fsdp.utils.ranks import Ranks


class Measuring(Protocol):
    """A hook that measures how good the model is."""

    def is_due(self, engine: TrainEngine, step: int) -> bool:
        """Whether it measures after this step."""
        ...

    def measure(self, engine: TrainEngine) -> None:
        """Measure now, and give the numbers to the engine."""
        ...


@dataclass
class BestSoFar:
    """What was measured, and which of it was the best.

    Args:
        metric: Its name; accuracies should rise, everything else should fall.
        min_delta: By how much the best must be beaten.
        history: Step and value of each measurement; None for what was not a finite number.
    """

    metric: str
    min_delta: float
    history: list[tuple[int, float | None]]

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and value; None where no number was measured."""
        best: tuple[int, float] | None = None
        for step, value in self.history:
            if value is not None and (best is None or self._is_better(value, best[1])):
                best = step, value
        return best

    @property
    def worse_in_a_row(self) -> int:
        """Measurements since the best one; all of them where there is none."""
        best = self.best
        return sum(best is None or step > best[0] for step, _ in self.history)

    def until(self, step: int) -> BestSoFar:
        """What was known after a step."""
        return BestSoFar(self.metric, self.min_delta, [each for each in self.history if each[0] <= step])

    def to_dict(self) -> JsonObject:
        """Return what `best.json` holds: the metric, the best measurement with its checkpoint, and the history."""
        found: JsonObject = {}
        if (best := self.best) is not None:
            found = {"step": best[0], "value": best[1], "checkpoint": checkpoint_folder(Path(), best[0]).name}
        return {"metric": self.metric, **found, "history": self.history}

    def _is_better(self, value: float, best: float) -> bool:
        if self.metric.startswith("eval_accuracy"):  # the only one that rises
            return value > best + self.min_delta
        return value < best - self.min_delta


def best_hook(
    parts: RunParts, checkpoints: CheckpointHook | None, measuring: Sequence[Measuring | None]
) -> BestHook | None:
    """The hook, where `training.evaluate.best_metric` asks for it, or the run is validated: then the best of those
    checkpoints is kept that were saved anyway."""
    manager, asked = parts.resume.manager, parts.arguments.training.evaluate
    is_validated = parts.arguments.training.val_interval > 0 and parts.data.validation is not None
    if manager is None or checkpoints is None or not (asked.best_metric or is_validated):
        return None
    model = parts.assembled.model
    by_default = "val_loss"
    if facts_of(model).kind is UNIFIED or draws_pictures(model):
        by_default = "val_total"  # words and pictures are trained together
    hooks = [each for each in measuring if each is not None]
    return BestHook(asked, asked.best_metric or by_default, manager, checkpoints, hooks, parts.record)


class BestHook(Hook):
    """Saves a checkpoint whenever a measurement is the best so far, and ends the run when `patience` of them in a row
    were not.

    What was measured stands in `best.json`, written after the checkpoint: a run that is killed anywhere and resumed
    keeps what was known up to its newest checkpoint, and measures that again if it had not come to it.

    Args:
        asked: The `training.evaluate` section.
        metric: What checkpoints are compared by.
        manager: Keeps the best checkpoint when old ones are deleted.
        checkpoints: Saves.
        measuring: The hooks that measure.
        record: Where it is told.
    """

    def __init__(
        self,
        asked: EvaluateArguments,
        metric: str,
        manager: CheckpointManager,
        checkpoints: CheckpointHook,
        measuring: Sequence[Measuring],
        record: RunRecord,
    ) -> None:
        self._manager, self._checkpoints, self._measuring, self._record = manager, checkpoints, measuring, record
        self._patience = asked.patience
        self._ranks = Ranks(manager.training.save_timeout_s)
        self._path = RunFolder(manager.save_folder).best
        self._known = BestSoFar(metric, asked.min_delta, [])
        self._saves = asked.best_metric is not None

    def on_train_begin(self, engine: TrainEngine) -> None:
        """Remember what earlier starts of the run have measured; make up for what the last one did not come to."""
        history = self._ranks.first("reading best.json", self._read)
        self._known = BestSoFar(self._known.metric, self._known.min_delta, history).until(engine.iteration)
        self._keep_best()
        step = engine.iteration
        # The last start ended between the checkpoint of this step and its measurement.
        if self._saves and step and (not self._known.history or self._known.history[-1][0] < step):
            self._make_up(engine, step)
        self._stop_if_patience_is_over(engine)

    def is_called_at_once(self, engine: TrainEngine, step: int) -> bool:
        """Where something is measured, which is done at once."""
        return any(hook.is_due(engine, step) for hook in self._measuring)

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Look at what was measured after this step."""
        if engine.validated_step != result.step:
            return
        self._take(engine)
        if result.step < engine.schedule.total_steps:
            self._stop_if_patience_is_over(engine)

    def on_train_end(self, engine: TrainEngine) -> None:
        """Say which checkpoint was the best."""
        if (best := self._known.best) is not None:
            folder = checkpoint_folder(self._manager.save_folder, best[0])
            self._record.progress.note(f"best   {self._known.metric} {best[1]:.4f} at step {best[0]}: {folder}")

    def on_failure(self, engine: TrainEngine) -> None:
        """Nothing: the error says what to do."""

    def _make_up(self, engine: TrainEngine, step: int) -> None:
        due = [each for each in self._measuring if each.is_due(engine, step)]
        random_state = capture_rng()
        for each in due:
            each.measure(engine)
        # Measuring must not change which numbers the next step draws.
        restore_rng(random_state)
        if due:
            self._take(engine)

    def _take(self, engine: TrainEngine) -> None:
        step, metric = engine.iteration, self._known.metric
        if metric not in engine.validation or not (self._saves or self._checkpoints.saved_step == step):
            return
        # All ranks hold the same number but for its last bits, and must decide alike.
        value = self._ranks.first("comparing with the best checkpoint", lambda: engine.validation[metric])
        self._known.history.append((step, value if math.isfinite(value) else None))
        best = self._known.best
        is_best = best is not None and best[0] == step
        if is_best and not self._checkpoints.ensure_saved(engine):  # on_save_error: continue
            self._known.history.pop()
            return
        self._keep_best()
        self._ranks.first("writing best.json", self._write)
        if is_best and self._saves:
            line = f"step {step}: the best so far, {self._known.metric} {value:.4f}; its checkpoint is kept"
            self._record.event("best", step, line, metric=self._known.metric, value=value)

    def _stop_if_patience_is_over(self, engine: TrainEngine) -> None:
        worse = self._known.worse_in_a_row
        if self._patience is None or worse < self._patience:
            return
        best = self._known.best
        since = f"better than that of step {best[0]}" if best else "a number"
        line = (
            f"stopped after step {engine.iteration}: {worse} measurements of {self._known.metric} in a row were not "
            f"{since} (training.evaluate.patience)"
        )
        self._record.event("early_stop", engine.iteration, line, metric=self._known.metric)
        engine.stop(together=True)

    def _keep_best(self) -> None:
        best = self._known.best
        self._manager.kept_step = best[0] if best is not None else None

    def _read(self) -> list[tuple[int, float | None]]:
        """What was measured before by the same metric; empty where the file was not written by us."""
        try:
            found = parse_json(self._path.read_text(encoding="utf-8"))
            if found["metric"] == self._known.metric:
                history: list[tuple[int, float | None]] = []
                for step, value in found["history"]:
                    history.append((int(step), None if value is None else float(value)))
                return history
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._record.note(f"warning: {self._path} cannot be read ({error}); the best checkpoint is looked for anew")
        return []

    def _write(self) -> None:
        atomic_write_text(self._path, json.dumps(self._known.to_dict(), indent=1) + "\n")
