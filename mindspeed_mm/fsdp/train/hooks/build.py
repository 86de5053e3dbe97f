"""The hooks of a run, in the order in which they come to their turn after a step; those of a few lines stand here."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice

import torch
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.features.speed.compiled_blocks import CompiledBlocks, GraphCount
from mindspeed_mm.fsdp.features.speed.low_precision import find_scales, scales_after_update
from mindspeed_mm.fsdp.loss.drawn_pictures import PICTURE_TERM
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.lora.calibration import calibration
from mindspeed_mm.fsdp.models.lora.first_values import FROM_DATA
from mindspeed_mm.fsdp.optimizer.ema import Ema
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.train.hooks.best import best_hook
from mindspeed_mm.fsdp.train.hooks.checkpoint import checkpoint_hook
from mindspeed_mm.fsdp.train.hooks.log import data_hook, log_hook
from mindspeed_mm.fsdp.train.hooks.profiles import memory_profile_hook, time_profile_hook
from mindspeed_mm.fsdp.train.run.data import build_pass_loader
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine


def build_hooks(parts: RunParts) -> list[Hook]:
    """The hooks that apply: what makes each says whether its hook does, None when it does not."""
    checkpoints, validation, evaluation = checkpoint_hook(parts), validation_hook(parts), None
    if parts.arguments.training.evaluate.interval:
        from mindspeed_mm.fsdp.train.hooks.evaluation import evaluation_hook  # a run that does not ask starts without

        evaluation = evaluation_hook(parts)
    built = [
        adapter_start_hook(parts),
        log_hook(parts),
        checkpoints,  # before what is measured: what fails there, or is cut off, finds the weights committed
        validation,
        evaluation,
        best_hook(parts, checkpoints, [validation, evaluation]),
        parts.family.sampling_hook(parts.assembled.model, parts.job, parts.record),
        data_hook(parts),
        compile_hook(parts),
        scales_hook(parts),
        garbage_hook(parts),
        memory_profile_hook(parts),
        time_profile_hook(parts),  # the last: what others do is not recorded
    ]
    return [hook for hook in built if hook is not None]


# --- adapters' start --------------------------------------------------------------------------------------------------


def adapter_start_hook(parts: RunParts) -> Hook | None:
    """The hook, where adapters start from data and no checkpoint says what they are."""
    training = parts.arguments.training
    is_from_data = training.lora.enable and training.lora.init_lora_weights in FROM_DATA
    if not is_from_data or parts.resume.checkpoint is not None:
        return None
    loader = build_pass_loader(parts.arguments.data, parts.arguments.training, parts.job.data_share, parts.data.train)
    return AdapterStartHook(loader.one_pass, training.lora, training.seed, parts.record.note)


class AdapterStartHook(Hook):
    """Runs `init_batches` micro-batches of the training data through the model and starts the adapters from what went
    into their layers. What is trained on afterwards begins with the first batch all the same.

    Args:
        batches: Makes a pass over the training data.
        lora: The `training.lora` section.
        seed: Of the run.
        note: Tells the user.
    """

    def __init__(
        self,
        batches: Callable[[], Iterable[list[Batch]]],
        lora: LoraArguments,
        seed: int,
        note: Callable[[str], None],
    ) -> None:
        self._batches, self._lora, self._seed, self._note = batches, lora, seed, note

    @override
    def on_train_begin(self, engine: TrainEngine) -> None:
        how = str(self._lora.init_lora_weights)
        self._note(f"{how}: looking at {self._lora.init_batches} micro-batches")
        with calibration(engine.model, how) as seen:
            engine.validate(islice(self._batches(), self._lora.init_batches))
        seen.start_adapters(self._seed)
        if engine.ema is not None:
            _copy_into(engine.ema, engine)


@torch.no_grad()
def _copy_into(ema: Ema, engine: TrainEngine) -> None:
    """An average starts as a copy of the weights."""
    averages = ema.tensors()
    for name, parameter in engine.model.named_parameters():
        if name in averages:
            averages[name].copy_(parameter)


# --- validation -------------------------------------------------------------------------------------------------------


def validation_hook(parts: RunParts) -> ValidationHook | None:
    """The hook, where there are held-out samples and `training.val_interval` asks for it."""
    interval = parts.arguments.training.val_interval
    batches = parts.held_out() if interval > 0 else None
    if batches is not None:
        return ValidationHook(batches, interval, parts.record)
    return None


class ValidationHook(Hook):
    """Mean loss on held-out samples every `interval` steps: `val_loss` is the objective's own (of a language model the
    cross-entropy), each term beside it has a name of its own (`val_z_loss`, `val_router_aux`). Terms have their weights
    in them; of a model that answers and draws, their sum, which training minimises, is `val_total`.

    Args:
        batches: Makes a pass over the validation set, the same each time.
        interval: Steps between two passes; a pass also follows the last step.
        record: Where the losses are told and written down.
    """

    def __init__(self, batches: Callable[[], Iterable[list[Batch]]], interval: int, record: RunRecord) -> None:
        self._batches = batches
        self._interval = interval
        self._record = record

    def is_due(self, engine: TrainEngine, step: int) -> bool:
        """Whether a pass follows this step."""
        is_last = step == engine.schedule.total_steps
        return is_last or (step % self._interval == 0 and not engine.stopping)

    def is_called_at_once(self, engine: TrainEngine, step: int) -> bool:
        """What is measured are the weights after a step."""
        return self.is_due(engine, step)

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Validate when it is time."""
        if self.is_due(engine, result.step):
            self.measure(engine)

    def measure(self, engine: TrainEngine) -> None:
        """Make a pass, and tell."""
        losses, step = engine.validate(self._batches()), engine.iteration
        if PICTURE_TERM in losses:
            losses["total"] = sum(losses.values())
        terms = {f"val_{name}": value for name, value in losses.items()}
        self._record.metrics({"step": step, **terms})
        engine.note_validation(terms)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
        self._record.event("validate", step, f"step {step}: validation {shown}", **losses)


# --- graphs -----------------------------------------------------------------------------------------------------------

SETTLED_STEPS = 2
"""Steps after which sizes that vary have been seen to vary."""
MOST_LATE_GRAPHS = 4
"""Graphs made later than that before the log says so."""


def compile_hook(parts: RunParts) -> Hook | None:
    """The hook, where blocks of this rank are compiled."""
    compiled = facts_of(parts.assembled.model).noted(CompiledBlocks)
    if compiled is not None and compiled.kinds:
        return CompileHook(compiled, parts.record)
    return None


class CompileHook(Hook):
    """Counts compilations and calls of blocks from the first step on: says what the compiler made of them, which blocks
    compute by plain operations and why, and warns once when it goes on compiling.

    Args:
        compiled: The blocks.
        record: Where it is told and written down.
    """

    def __init__(self, compiled: CompiledBlocks, record: RunRecord) -> None:
        self._compiled, self._record = compiled, record
        self._count = GraphCount()
        self._steps = 0
        self._settled: int | None = None
        self._told: set[str] = set()

    def on_train_begin(self, engine: TrainEngine) -> None:
        """Graphs of a run before this one in the same process do not count."""
        self._count = GraphCount()

    def before_next_step(self, engine: TrainEngine) -> None:
        """One line when the first steps are done, others when blocks are given up or too much is compiled again."""
        self._steps += 1
        for kind, reason in self._compiled.given_up().items():
            if kind not in self._told:
                self._told.add(kind)
                line = f"compile {kind}: plain operations for what its graphs do not fit: {reason}"
                self._record.event("compile", engine.iteration, line, block=kind, reason=reason)
        if self._steps == SETTLED_STEPS:
            self._settled = self._count.graphs
            self._tell(engine.iteration)
        elif self._settled is not None and self._count.graphs > self._settled + MOST_LATE_GRAPHS:
            self._record.note(
                f"warning: {self._count.graphs - self._settled} graphs were compiled after step {SETTLED_STEPS}: "
                "shapes vary. Keep them stable by packing (data.dataset_param.basic_parameters.packing), a larger "
                "data.dataloader_param.collate_param.pad_to_multiple_of, or features.compile_plan.dynamic=true"
            )
            self._settled = None

    def on_train_end(self, engine: TrainEngine) -> None:
        """What became of all calls."""
        if self._steps > SETTLED_STEPS:
            self._tell(engine.iteration)

    def _tell(self, step: int) -> None:
        line = f"compile {self._compiled.describe()}; {self._count.describe()} in {self._steps} steps"
        numbers = self._compiled.counts()
        self._record.event("compile", step, line, **numbers)


# --- scales of 8-bit weights ------------------------------------------------------------------------------------------


def scales_hook(parts: RunParts) -> Hook | None:
    """The hook, where the quantisation plan finds scales after updates."""
    is_asked = scales_after_update(parts.assembled.model, parts.arguments.training.quantization_plan)
    if is_asked:
        return ScalesHook()
    return None


class ScalesHook(Hook):
    """Finds the scales of all 8-bit weights after each update, by one reduction."""

    def on_train_begin(self, engine: TrainEngine) -> None:
        """Those of the weights that the run starts with."""
        find_scales(engine.model)

    def before_next_step(self, engine: TrainEngine) -> None:
        """Those of the new weights."""
        find_scales(engine.model)


# --- garbage collection -----------------------------------------------------------------------------------------------


def garbage_hook(parts: RunParts) -> Hook | None:
    """The hook, where `training.manual_gc_interval` asks for it."""
    interval = parts.arguments.training.manual_gc_interval
    if interval > 0:
        return GarbageCollectionHook(interval)
    return None


class GarbageCollectionHook(Hook):
    """Collects garbage at the same step on every rank, so that no rank pauses alone."""

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def on_train_begin(self, engine: TrainEngine) -> None:
        """Take collection out of Python's hands."""
        gc.disable()
        gc.collect()

    def before_next_step(self, engine: TrainEngine) -> None:
        """Collect the young generation when it is time."""
        if engine.iteration % self._interval == 0:
            gc.collect(1)

    def on_train_end(self, engine: TrainEngine) -> None:
        """Turn Python's own garbage collection on again."""
        gc.enable()


# --- the caller's function --------------------------------------------------------------------------------------------


class CallbackHook(Hook):
    """Calls a function after every step, validation and save included; when it returns True the run ends there.

    Args:
        function: Called with the step's result.
    """

    def __init__(self, function: Callable[[StepResult], object]) -> None:
        self._function = function

    @override
    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        if engine.validated_step == result.step:
            result = replace(result, validation=engine.validation)
        if self._function(result) is True:
            engine.stop()
