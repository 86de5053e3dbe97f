"""The training loop: one optimizer step after another, with one host synchronisation each.

The engine knows no model family and no plan. It asks the objective what to count and to sum, the plan's appliers have
already decided where everything lives, and hooks do what is not the step itself: log, validate, save.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import DivergedError, MMError
from mindspeed_mm.fsdp.checkpoint.loop_state import LoopState
from mindspeed_mm.fsdp.data.dataloader.order import DataPosition
from mindspeed_mm.fsdp.data.dataloader.preload import moved
from mindspeed_mm.fsdp.distributed.context.apply import ContextParallel
from mindspeed_mm.fsdp.distributed.pipeline.apply import Pipeline
from mindspeed_mm.fsdp.distributed.towers.idle import IdleTowers
from mindspeed_mm.fsdp.loss.objectives import Objective, Terms, is_measured
from mindspeed_mm.fsdp.ops.host_values import carry_host_values
from mindspeed_mm.fsdp.ops.mask_facts import carry_facts
from mindspeed_mm.fsdp.optimizer.clip_grad import clip_grads_, grad_norm, unscale_grads_
from mindspeed_mm.fsdp.optimizer.ema import Ema
from mindspeed_mm.fsdp.optimizer.groups import set_lr
from mindspeed_mm.fsdp.optimizer.loss_scale import LossScale
from mindspeed_mm.fsdp.optimizer.schedules import Schedule
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.train.run.failures import Autopsy, explained_model, explained_step, sample_ids, shortened
from mindspeed_mm.fsdp.train.run.job import Phase, without_limit
from mindspeed_mm.fsdp.train.run.stop_signal import StopSignal
from mindspeed_mm.fsdp.train.step.forward_backward import ForwardBackward, add_terms
from mindspeed_mm.fsdp.train.step.tally import Tally
from mindspeed_mm.fsdp.utils import ranges
from mindspeed_mm.fsdp.utils.ranges import named

Item = TypeVar("Item")


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step was; losses and norm are global."""

    step: int
    losses: dict[str, float]
    grad_norm: float
    lr: float
    tally: Tally
    seconds: float
    data_seconds: float
    skipped: str = ""
    """Why the step was not applied, with rank and samples; empty when it was."""
    validation: Mapping[str, float] = field(default_factory=dict)
    """What a validation after this step measured, `val_loss` first; empty when there was none. Filled in for functions
    that are called after the step."""
    loss_scale: float | None = None
    """What the loss was multiplied by for the backward pass; None where gradients need none."""

    @property
    def loss(self) -> float:
        """Sum of all terms that are minimised."""
        return sum(value for name, value in self.losses.items() if not is_measured(name))


class Hook:
    """Something that happens around steps. Every method is optional."""

    def on_train_begin(self, engine: TrainEngine) -> None:
        """Called once when training begins, before the first step of this start."""

    def on_gradients(self, engine: TrainEngine, norm: torch.Tensor) -> None:
        """Between the backward passes of a step and its update: gradients are whole and not clipped, `norm` is
        theirs."""

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Called after each optimizer step with its result, also where the update was skipped."""

    def on_train_end(self, engine: TrainEngine) -> None:
        """After the last step, or after a stop that was asked for."""

    def on_failure(self, engine: TrainEngine) -> None:
        """Training ends with an error: finish what was begun and let go of what is held."""
        self.on_train_end(engine)


class StepLoader(Protocol):
    """Yields the micro-batches of one optimizer step at a time and knows its position in the data."""

    position: DataPosition

    @property
    def bad_samples(self) -> dict[str, str]:
        """Rows that could not be used → reason."""
        ...

    @property
    def untold_bad_samples(self) -> int:
        """How many of them the other ranks do not know of."""
        ...

    def __iter__(self) -> Iterator[list[Batch]]: ...


@dataclass
class TrainEngine:
    """Owns the step. Built by `Trainer`; everything it needs is handed in.

    Args:
        model: Sharded, loaded model.
        objective: What is counted and summed.
        forward_backward: Strategy for a step's micro-batches.
        optimizer: Over the trainable parameters.
        schedule: Learning rate by step.
        training: The `training` section.
        device: Where batches go.
        loader: The training data, step by step.
        data_group: Ranks that hold different samples; None when there is one.
        all_ranks: Every rank, which stop together; None for one process.
        counts_samples: False on ranks that compute on the samples of another one (tensor and context parallelism).
        context: How sequences are spread over ranks, when they are.
        pipeline: How layers are spread over ranks, when they are.
        towers: Stand-ins for towers whose modality a rank lacks.
        ema: Moving average of the weights.
        stop_signal: Whether this process was asked to stop.
        stop_after: Stop after this many steps of this start, as if the schedule ended there.
        rank: Global rank, for messages.
        phase: Limits how long a step may take.
        autopsy: Asked when memory does not suffice.
        meter: Counts the FLOPs of micro-batches.
        loss_scale: Of gradients in fp16; None: the others need none.
        hooks: Called around steps, in this order.
    """

    model: nn.Module
    objective: Objective
    forward_backward: ForwardBackward
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    training: TrainingArguments
    device: torch.device
    loader: StepLoader
    data_group: dist.ProcessGroup | None = None
    all_ranks: dist.ProcessGroup | None = None
    counts_samples: bool = True
    context: ContextParallel | None = None
    pipeline: Pipeline | None = None
    towers: IdleTowers | None = None
    ema: Ema | None = None
    stop_signal: StopSignal | None = None
    stop_after: int | None = None
    rank: int = 0
    phase: Phase = without_limit
    autopsy: Autopsy | None = None
    meter: Callable[[Sequence[Batch]], dict[str, float]] | None = None
    loss_scale: LossScale | None = None
    hooks: list[Hook] = field(default_factory=list)
    stop_wanted: bool = False
    """Whether a hook has asked for an end."""
    stopping: bool = False
    """Whether all ranks have agreed on an end: no further step is begun."""
    validated_step: int = 0
    """The step after which the latest validation came; 0 when there was none."""
    validation: dict[str, float] = field(default_factory=dict)
    """What it measured."""
    first_iteration: int = 0
    """Steps done when this start of the run began."""
    iteration: int = 0
    """Steps done."""
    consumed_samples: int = 0
    """Samples trained on, of all ranks."""
    skipped_in_a_row: int = 0
    """Steps that were not applied, up to the latest one."""

    @property
    def last_step(self) -> int:
        """The step after which this start ends, unless it is stopped before."""
        if self.stop_after is None:
            return self.schedule.total_steps
        return min(self.schedule.total_steps, self.first_iteration + self.stop_after)

    def train(self) -> None:
        """Run steps until the schedule's total, or until a stop is asked for.

        Raises:
            DivergedError: The loss or a gradient is not finite and the policy says stop.
            MachineError: The device ran out of memory; the message names the batch.
        """
        try:
            for hook in self.hooks:
                hook.on_train_begin(self)
            self._run(iter(self.loader))
        except BaseException:
            for hook in self.hooks:
                with suppress(MMError):  # what went wrong first is what is raised
                    hook.on_failure(self)
            raise
        for hook in self.hooks:
            hook.on_train_end(self)

    def _run(self, steps: Iterator[list[Batch]]) -> None:
        while self.iteration < self.last_step and not self.stopping:
            number = self.iteration + 1
            with self.phase(f"step {number}", self.training.step_timeout_s), named(f"{ranges.STEP}{number}"):
                started = time.perf_counter()
                with named(ranges.DATA_WAIT):
                    micro_batches = next(steps)
                waited = time.perf_counter() - started
                result = self.train_step(micro_batches, data_seconds=waited)
            for hook in self.hooks:
                hook.on_step_end(self, result)

    def train_step(self, micro_batches: Sequence[Batch], data_seconds: float = 0.0) -> StepResult:
        """One optimizer step. `micro_batches` are this rank's; what the objective counts in them is summed over all
        ranks first, so that each loss term has one denominator."""
        started = time.perf_counter()
        with named(ranges.PREPARE):
            prepared = [self.objective.prepare(batch) for batch in micro_batches]
            tally = self._tally(prepared)
        lr = self.schedule.at(self.iteration)
        set_lr(self.optimizer, lr)
        with explained_step(prepared, self.iteration + 1, self.rank, self.autopsy):
            local_losses = self._forward_backward(prepared, tally)
            with named(ranges.CLIP):
                norm = self._norm()
            for hook in self.hooks:
                hook.on_gradients(self, norm)
            with named(ranges.READ):
                losses, grad_norm_value = self._read_together(local_losses, norm)
            finite = all(map(math.isfinite, (*losses.values(), grad_norm_value)))
            if finite:
                self._update(norm)
        self.optimizer.zero_grad()
        self.iteration += 1
        self.consumed_samples += tally.samples
        self.stopping = tally.stop_requested
        scale = self.loss_scale.value if self.loss_scale is not None else None  # as it was in this step
        if finite or self._is_loss_scale_overflow(losses):
            skipped = self._rescale(overflowed=not finite)
            self.skipped_in_a_row = 0
        else:
            skipped = self._skip_or_stop(losses, grad_norm_value, local_losses, prepared)
            self.skipped_in_a_row += 1
        return StepResult(
            step=self.iteration,
            losses=losses,
            grad_norm=grad_norm_value,
            lr=lr,
            tally=tally,
            seconds=time.perf_counter() - started + data_seconds,
            data_seconds=data_seconds,
            skipped=skipped,
            loss_scale=scale,
        )

    def stop(self, *, together: bool = False) -> None:
        """End the run after this step and save; for hooks. Several ranks end after the next step, in which they agree
        on it, unless all of them call this `together`."""
        self.stop_wanted = True
        self.stopping = self.stopping or together or self.all_ranks is None

    def note_validation(self, terms: Mapping[str, float]) -> None:
        """Keep what a validation after this step has measured, beside what another one has."""
        if self.validated_step != self.iteration:
            self.validated_step, self.validation = self.iteration, {}
        self.validation = {**self.validation, **terms}

    def state(self) -> LoopState:
        """What a checkpoint keeps of the loop itself."""
        state: LoopState = {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "skipped_in_a_row": self.skipped_in_a_row,
            "data_position": self.loader.position.to_dict(),
            "bad_samples": self.loader.bad_samples,
        }
        if self.loss_scale is not None:
            state["loss_scale"] = self.loss_scale.state()
        return state

    def load_state(self, state: LoopState) -> None:
        """Continue where `state` was taken."""
        self.first_iteration = self.iteration = state["iteration"]
        self.consumed_samples = state["consumed_samples"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.load_state(state["loss_scale"])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While inside, the model is in evaluation mode and, when asked for, its weights are their moving average."""
        with ExitStack() as averaged:
            if self.ema is not None and self.ema.is_result and self.training.ema.use_for_evaluation:
                averaged.enter_context(self.ema.applied())
            self.model.eval()
            yield
        self.model.train()

    @torch.no_grad()
    def validate(self, batches: Iterable[list[Batch]]) -> dict[str, float]:
        """Mean of each loss term over `batches`, with one global denominator; weights and gradients untouched."""
        with self.evaluating():
            return self._validate(batches)

    def _validate(self, batches: Iterable[list[Batch]]) -> dict[str, float]:
        sums: Terms = {}
        counts: dict[str, float] = {}
        for micro_batches in batches:
            with self.phase("validation", self.training.step_timeout_s):
                prepared = [self.objective.prepare(batch, training=False) for batch in micro_batches]
                for name, count in self._tally(prepared).counts.items():
                    counts[name] = counts.get(name, 0) + count
                own = [self.own(batch) for batch in prepared]
                with explained_model(prepared, f"the validation after step {self.iteration}", self.rank):
                    add_terms(sums, self.forward_backward.evaluate(own))
        means = {name: value / (counts[name] or 1) for name, value in sums.items()}
        losses, _ = self._read_together(means, torch.zeros((), device=self.device))
        return losses

    def _forward_backward(self, prepared: Sequence[Batch], tally: Tally) -> Terms:
        """Gradients, and this rank's share of each normalised term. A loss scale is a part of the denominators."""
        own = [self.own(batch) for batch in prepared]
        if self.loss_scale is None:
            return self.forward_backward(own, tally.denominators)
        scale = self.loss_scale.value
        denominators = {name: count / scale for name, count in tally.denominators.items()}
        scaled = self.forward_backward(own, denominators)
        unscale_grads_(self.model.parameters(), scale)
        return {name: value / scale for name, value in scaled.items()}

    def _is_loss_scale_overflow(self, losses: dict[str, float]) -> bool:
        """Whether a step that is not finite is one of a loss scale that was too large, on whatever rank: the loss is a
        number, and a smaller scale can be tried."""
        can_fall = self.loss_scale is not None and self.loss_scale.can_fall
        return can_fall and all(map(math.isfinite, losses.values()))

    def _rescale(self, *, overflowed: bool) -> str:
        """Let the loss scale go on; why the step was left out, if it was."""
        if self.loss_scale is None:
            return ""
        before = self.loss_scale.value
        self.loss_scale.update(overflowed=overflowed)
        if not overflowed:
            return ""
        return (
            f"step {self.iteration}: gradients overflowed in fp16 and were left out; the loss scale falls from "
            f"{before:g} to {self.loss_scale.value:g}"
        )

    def own(self, prepared: Batch) -> Batch:
        """What this rank computes of a prepared micro-batch, on its device. Counted was the whole of it."""
        with named(ranges.TO_DEVICE):
            if self.context is not None:
                prepared = self.context.split(prepared)
            return move(prepared, self.device)

    def _tally(self, prepared: Sequence[Batch]) -> Tally:
        """Sum over all ranks what a step needs to know before it starts. Host numbers over the host's own backend:
        the device is not waited for."""
        stop = self.stop_wanted or (self.stop_signal is not None and self.stop_signal.requested)
        towers = self.towers.present(prepared) if self.towers else {}
        tally = Tally.of(self.objective, prepared, stop, towers, self.loader.untold_bad_samples, self.meter)
        if self.all_ranks is not None:
            tally = tally.summed_over(self.all_ranks, self.counts_samples)
        if self.towers is not None:
            self.towers.set_active([name for name, ranks in tally.towers.items() if ranks])
        return tally

    def _read_together(self, local_losses: Terms, norm: torch.Tensor) -> tuple[dict[str, float], float]:
        """The step's one host synchronisation: losses summed over ranks, and the norm."""
        names = sorted(local_losses)
        numbers = torch.stack([local_losses[name] for name in names])
        if self.data_group is not None:
            dist.all_reduce(numbers, group=self.data_group)
        if self.context is not None:
            self.context.sum_losses(numbers)
        *losses, norm_value = torch.cat([numbers, norm.to(numbers.dtype).reshape(1)]).tolist()
        return dict(zip(names, losses, strict=True)), norm_value

    def _norm(self) -> torch.Tensor:
        if self.pipeline is None:
            return grad_norm(self.model.parameters())
        return grad_norm(self.pipeline.counted_parameters(), self.pipeline.group)

    def _update(self, norm: torch.Tensor) -> None:
        if self.training.clip_grad > 0:
            with named(ranges.CLIP):
                foreach = self.training.clip_grad_foreach
                clip_grads_(self.model.parameters(), norm, self.training.clip_grad, foreach=foreach)
        with named(ranges.OPTIMIZER):
            self.optimizer.step()
            if self.ema is not None:
                self.ema.update(self.iteration + 1)

    def _skip_or_stop(
        self, losses: dict[str, float], norm: float, local_losses: Terms, prepared: Sequence[Batch]
    ) -> str:
        """A step that is not finite was not applied: say where it came from, and stop when the policy says so."""
        is_finite = all(math.isfinite(float(value)) for value in local_losses.values())
        ranks = self._gather((self.rank, is_finite, sample_ids(prepared)))
        # Where all losses are finite, it may be the gradient of any rank.
        suspects = [each for each in ranks if not each[1]] or ranks
        where = "; ".join(f"rank {rank}: samples {shortened(samples)}" for rank, _, samples in suspects[:8])
        what = f"step {self.iteration} is not finite (loss {sum(losses.values())}, gradient norm {norm})"
        key, way_out = "training.on_nonfinite", "Look at these samples and lower training.lr"
        if self.loss_scale is not None:
            way_out += ", or compute in bf16 (parallel.fsdp_plan.param_dtype)"
        if self.training.on_nonfinite != "skip":
            way_out += ", or set training.on_nonfinite=skip"
        elif self.skipped_in_a_row < self.training.max_skipped_steps:
            return f"{what} and was skipped; {where}"
        else:
            key = "training.max_skipped_steps"
            way_out = f"{self.skipped_in_a_row} steps in a row were skipped before it. {way_out}"
        raise DivergedError(
            f"{what}; the weights are those of the step before", where=where, key=key, way_out=f"{way_out}."
        )

    def _gather(self, item: Item) -> list[Item]:
        if self.data_group is None:
            return [item]
        gathered = [item] * dist.get_world_size(self.data_group)
        dist.all_gather_object(gathered, item, group=self.data_group)
        return gathered


def move(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`."""
    if device.type == "cpu":
        return batch
    there = dict(batch)
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            there[key] = moved(value, device)
    carry_facts(batch, there)
    carry_host_values(batch, there)
    return there
