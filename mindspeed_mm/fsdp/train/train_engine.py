"""The training loop: one optimizer step after another.

The engine knows no model family and no plan. It asks the objective what to count and to sum, the plan's appliers have
already decided where everything lives, and hooks do what is not the step itself: log, validate, save.

With `late`, the host does not wait for the step that it has just launched. The device itself leaves out an update that
is not finite; the host reads a step's numbers when the forward and backward passes of the next one are launched, and
before its update is. So weights, averages and counters are still those after the step when its hooks are called.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.checkpoint.loop_state import LoopState
from mindspeed_mm.fsdp.data.dataloader.order import DataPosition
from mindspeed_mm.fsdp.data.dataloader.transport import moved
from mindspeed_mm.fsdp.distributed.context.apply import ContextParallel
from mindspeed_mm.fsdp.distributed.pipeline.apply import Pipeline
from mindspeed_mm.fsdp.distributed.towers.idle import IdleTowers
from mindspeed_mm.fsdp.loss.objectives import Objective, Terms
from mindspeed_mm.fsdp.ops.host_values import carry_facts, carry_host_values
from mindspeed_mm.fsdp.optimizer.adamw import ShardedAdamW
from mindspeed_mm.fsdp.optimizer.clip_grad import NormAverage, clip_grads_, grad_norm, unscale_grads_
from mindspeed_mm.fsdp.optimizer.ema import Ema
from mindspeed_mm.fsdp.optimizer.groups import set_lr
from mindspeed_mm.fsdp.optimizer.loss_scale import LossScale
from mindspeed_mm.fsdp.optimizer.schedules import Schedule
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.train.hook import Hook, StepResult
from mindspeed_mm.fsdp.train.run.failures import Autopsy, explained_model, explained_step, sample_ids
from mindspeed_mm.fsdp.train.run.job import Phase, without_limit
from mindspeed_mm.fsdp.train.run.stop_signal import StopSignal
from mindspeed_mm.fsdp.train.step.forward_backward import ForwardBackward, add_terms
from mindspeed_mm.fsdp.train.step.tally import (
    LaunchedStep,
    Tally,
    left_out_on_device,
    over_ranks,
    skipped_or_stopped,
)
from mindspeed_mm.fsdp.utils import ranges
from mindspeed_mm.fsdp.utils.device import ArrivingNumbers
from mindspeed_mm.fsdp.utils.ranges import named

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.train.distillation.critic import Critic

__all__ = ["Hook", "StepLoader", "StepResult", "TrainEngine", "move"]

LAST_NUMBERS_S = 10.0
"""How long a run that ends by an error waits for the numbers of the step before."""


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
        critic: Trained in front of each step's update, in a distillation.
        stop_signal: Whether this process was asked to stop.
        stop_after: Stop after this many steps of this start, as if the schedule ended there.
        rank: Global rank, for messages.
        phase: Limits how long a step may take.
        autopsy: Asked when memory does not suffice.
        meter: Counts the FLOPs of micro-batches.
        loss_scale: Of gradients in fp16; None: the others need none.
        norm_average: What the bound of clipping follows; None: it is `clip_grad`.
        late: Let the device decide on updates, and read a step's numbers when the next one is launched.
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
    critic: Critic | None = None
    stop_signal: StopSignal | None = None
    stop_after: int | None = None
    rank: int = 0
    phase: Phase = without_limit
    autopsy: Autopsy | None = None
    meter: Callable[[Sequence[Batch]], dict[str, float]] | None = None
    loss_scale: LossScale | None = None
    norm_average: NormAverage | None = None
    late: bool = False
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
    launched: LaunchedStep | None = None
    """The step whose numbers are not read yet."""

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
            try:
                self._tell_last()
            finally:
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
                if self.launched is not None and not self.launched.numbers.are_there():
                    waited = 0.0  # the device was still at work
                launched = self.train_step(micro_batches, data_seconds=waited)
                result = self.settle() if launched.at_once else None
            for hook in self.hooks:
                hook.on_step_launched(self)
            if result is not None:
                self._tell(result)
            for hook in self.hooks:
                hook.before_next_step(self)

    def train_step(self, micro_batches: Sequence[Batch], data_seconds: float = 0.0) -> LaunchedStep:
        """Launch one optimizer step; `settle` says what it was. `micro_batches` are this rank's; what the objective
        counts in them is summed over all ranks first, so that each loss term has one denominator."""
        began = time.perf_counter() - data_seconds
        step = self.iteration + 1
        with named(ranges.PREPARE):
            prepared = [self.objective.prepare(batch) for batch in micro_batches]
            asks = not self.late or any(hook.is_called_at_once(self, step) for hook in self.hooks)
            tally = self._tally(prepared, asks)
        lr = self.schedule.at(self.iteration)
        set_lr(self.optimizer, lr)
        with explained_step(prepared, step, self.rank, self.autopsy):
            local_losses = self._forward_backward(prepared, tally)
            with named(ranges.CLIP):
                norm = self._norm()
            if self.launched is not None:  # the step before: all that is of it comes before this one's update
                self._tell(self.settle())
                began = time.perf_counter()
            for hook in self.hooks:
                hook.on_gradients(self, norm)
            numbers = self._numbers(local_losses, norm)
            launched = self.launched = LaunchedStep(
                step=step,
                names=sorted(local_losses),
                numbers=ArrivingNumbers(numbers),
                local_losses=local_losses,
                samples=sample_ids(prepared),
                lr=lr,
                tally=tally,
                began=began,
                data_seconds=data_seconds,
                loss_scale=self.loss_scale.value if self.loss_scale is not None else None,
                at_once=tally.at_once or tally.stop_requested or step == self.last_step,
            )
            if self.late:
                self._update(norm, left_out_on_device(numbers))
            else:
                with named(ranges.READ):
                    is_finite = all(map(math.isfinite, launched.numbers.tolist()))
                if is_finite:
                    self._update(norm)
        self.optimizer.zero_grad()
        self.iteration = step
        self.consumed_samples += tally.samples
        self.stopping = tally.stop_requested
        return launched

    def settle(self) -> StepResult:
        """Read the numbers of the step that was launched last, and do what follows from them: its part in the average
        of the weights, the loss scale, the policy for steps that are not finite.

        Raises:
            DivergedError: It is not finite and the policy says stop.
        """
        launched = self.launched
        assert launched is not None  # after `train_step`, once
        with named(ranges.READ):
            losses, norm = launched.read()
        self.launched = None
        return self._settled(launched, losses, norm, self.data_group)

    def _settled(
        self, launched: LaunchedStep, losses: dict[str, float], norm: float, group: dist.ProcessGroup | None
    ) -> StepResult:
        finite = all(map(math.isfinite, (*losses.values(), norm)))
        if finite and self.ema is not None:
            self.ema.update(launched.step)
        if finite and self.norm_average is not None:
            self.norm_average.after_step(norm)
        scale, skipped = self.loss_scale, ""
        if finite or (scale is not None and scale.can_explain(losses.values())):
            if scale is not None:
                skipped = scale.after_step(launched.step, overflowed=not finite)
            self.skipped_in_a_row = 0
        else:
            skipped = skipped_or_stopped(
                launched,
                losses,
                norm,
                over_ranks(launched, self.model, self.rank, group),
                self.training,
                skipped_before=self.skipped_in_a_row,
                has_critic=self.critic is not None,
            )
            self.skipped_in_a_row += 1
        return StepResult(
            step=launched.step,
            losses=losses,
            grad_norm=norm,
            lr=launched.lr,
            tally=launched.tally,
            seconds=time.perf_counter() - launched.began,
            data_seconds=launched.data_seconds,
            skipped=skipped,
            loss_scale=launched.loss_scale,
        )

    def _tell(self, result: StepResult) -> None:
        for hook in self.hooks:
            hook.on_step_end(self, result)

    def _tell_last(self) -> None:
        """Training ends with an error: what the step before it was, where the device still says so. The other ranks are
        not asked, since they may not be there."""
        launched, self.launched = self.launched, None
        if launched is None or launched.step != self.iteration:
            return
        with suppress(RuntimeError):  # of a device that is broken
            if launched.numbers.come_within(LAST_NUMBERS_S):
                losses, norm = launched.read()
                self._tell(self._settled(launched, losses, norm, group=None))

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
        if self.norm_average is not None:
            state["norm_average"] = self.norm_average.state()
        return state

    def load_state(self, state: LoopState) -> None:
        """Continue where `state` was taken."""
        self.first_iteration = self.iteration = state["iteration"]
        self.consumed_samples = state["consumed_samples"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.load_state(state["loss_scale"])
        if self.norm_average is not None and "norm_average" in state:
            self.norm_average.load_state(state["norm_average"])

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
        # Sums over ranks; there is no norm, and a zero in its place.
        *losses, _ = self._numbers(means, torch.zeros((), device=self.device)).tolist()
        return dict(zip(sorted(means), losses, strict=True))

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

    def own(self, prepared: Batch) -> Batch:
        """What this rank computes of a prepared micro-batch, on its device. Counted was the whole of it."""
        with named(ranges.TO_DEVICE):
            if self.context is not None:
                prepared = self.context.split(prepared)
            return move(prepared, self.device)

    def _tally(self, prepared: Sequence[Batch], at_once: bool = False) -> Tally:
        """Sum over all ranks what a step needs to know before it starts. Host numbers over the host's own backend:
        the device is not waited for."""
        stop = self.stop_wanted or (self.stop_signal is not None and self.stop_signal.requested)
        towers = self.towers.present(prepared) if self.towers else {}
        untold = self.loader.untold_bad_samples
        tally = Tally.of(self.objective, prepared, stop, towers, untold, self.meter, at_once)
        if self.all_ranks is not None:
            tally = tally.summed_over(self.all_ranks, self.counts_samples)
        if self.towers is not None:
            self.towers.set_active([name for name, ranks in tally.towers.items() if ranks])
        return tally

    def _numbers(self, local_losses: Terms, norm: torch.Tensor) -> torch.Tensor:
        """Losses summed over ranks, in the order of their names, and the norm; nothing is waited for."""
        numbers = torch.stack([local_losses[name] for name in sorted(local_losses)])
        if self.data_group is not None:
            dist.all_reduce(numbers, group=self.data_group)
        if self.context is not None:
            self.context.sum_losses(numbers)
        return torch.cat([numbers, norm.to(numbers.dtype).reshape(1)])

    def _norm(self) -> torch.Tensor:
        if self.pipeline is None:
            return grad_norm(self.model.parameters())
        return grad_norm(self.pipeline.counted_parameters(), self.pipeline.group)

    def _update(self, norm: torch.Tensor, left_out: torch.Tensor | None = None) -> None:
        """Clip, and step; `left_out` lets the device leave it out."""
        if self.training.clip_grad > 0:
            with named(ranges.CLIP):
                bound, foreach = self.training.clip_grad, self.training.clip_grad_foreach
                if self.norm_average is not None:  # of the steps before, which are settled
                    bound = self.norm_average.bound(bound)
                clip_grads_(self.model.parameters(), norm, bound, foreach=foreach)
        with named(ranges.OPTIMIZER):
            if left_out is None:
                self.optimizer.step()
            else:
                assert isinstance(self.optimizer, ShardedAdamW)  # the only one that `late` stands for
                self.optimizer.step_unless(left_out)


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
