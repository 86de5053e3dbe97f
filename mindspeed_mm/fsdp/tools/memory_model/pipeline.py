"""A rank's part of a pipeline's step, in a simulation: its own stages run, in the order of the real schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.distributed.pipeline.carried import Boundary, Passed
from mindspeed_mm.fsdp.distributed.pipeline.plan import StagePlan
from mindspeed_mm.fsdp.distributed.pipeline.schedules import work_of_rank
from mindspeed_mm.fsdp.distributed.pipeline.stage import StageModule, StepWork
from mindspeed_mm.fsdp.params.parallel_args import PpPlan
from mindspeed_mm.fsdp.tools.memory_model.ledger import TEMPORARY, MemoryLedger
from mindspeed_mm.fsdp.tools.memory_model.simulation import Simulation

Place = tuple[int, int]
"""A stage and a micro-batch."""


class SimulatedPipeline:
    """The stages of one rank.

    Args:
        simulation: Under way; the rank's ledger is the one that it writes.
        model: Whole, weights of several stages untied, with everything applied that stages keep.
        plan: The stages.
        rank: Of the pipeline.
        dtype: Of what passes between stages.
        media: Batch keys that feed what the first stage alone has.
    """

    def __init__(
        self,
        simulation: Simulation,
        model: nn.Module,
        plan: StagePlan,
        rank: int,
        dtype: torch.dtype,
        media: Sequence[str],
    ) -> None:
        self._simulation, self._plan, self._rank = simulation, plan, rank
        self._boundary = boundary = Boundary(model, plan, dtype)
        own = plan.stages_of(rank)
        self._stages = {stage: StageModule(model, plan, stage, boundary, dtype, media) for stage in own}
        self._received: dict[Place, tuple[Tensor, ...]] = {}
        self._gradients: dict[Place, tuple[Tensor, ...]] = {}
        self._under_way: dict[Place, Any] = {}
        self._sent: list[Any] = []

    def run(
        self,
        settings: PpPlan,
        batch: Batch,
        micro_batches: int,
        loss: Callable[[nn.Module, Batch], Tensor],
        forward_ended: Callable[[], None],
    ) -> None:
        """One step of micro-batches that are all alike.

        Args:
            settings: The section.
            batch: One micro-batch, on the rank.
            micro_batches: How many.
            loss: What is minimised.
            forward_ended: Called behind every forward pass.
        """
        work = StepWork(_Sum(loss), [batch] * micro_batches, {_Sum.NAME: 1.0})
        with self._simulation.writing(MemoryLedger()):  # shapes take no memory that stays
            entering = self._boundary.crossings(work.objective, batch)
        work.crossings = [entering] * micro_batches
        for stage, module in self._stages.items():
            module.work = work
            self._lay_out(stage, entering, micro_batches)
        if settings.schedule != "gpipe":  # others repeat themselves once every stage has begun
            micro_batches = min(micro_batches, 2 * self._plan.stages)
        for kind, stage, number in work_of_rank(settings.schedule, self._plan, self._rank, micro_batches):
            if kind == "F":
                with self._simulation.phase("forward"):
                    self._forward(stage, number)
                forward_ended()
            elif kind != "I":  # what is split stays until the gradients of weights are there
                with self._simulation.phase("backward", TEMPORARY):
                    self._backward(stage, number)
        for module in self._stages.values():
            module.work = None

    def _lay_out(self, stage: int, entering: Sequence[list[Passed]], micro_batches: int) -> None:
        """Tensors that are received into are there from the beginning of the step (`OwnShapes.lay_out`)."""
        last = self._plan.stages - 1
        for number in range(micro_batches):
            if stage:
                self._received[stage, number] = self._empty(entering[stage])
            if stage < last:
                self._gradients[stage, number] = self._empty(entering[stage + 1])

    def _empty(self, tensors: Sequence[Passed]) -> tuple[Tensor, ...]:
        return tuple(self._simulation.empty(shape, dtype) for shape, dtype in tensors)

    def _forward(self, stage: int, number: int) -> None:
        received = tuple(each.requires_grad_() for each in self._received.get((stage, number), ()))
        outputs = self._stages[stage](*received, mb=torch.tensor([number]))
        self._under_way[stage, number] = outputs
        if stage + 1 in self._stages:
            self._received[stage + 1, number] = tuple(each.detach() for each in outputs)
        elif len(self._stages) > 1 and stage < self._plan.stages - 1:
            self._sent.append(outputs)  # schedules of several stages wait for what they sent at the end of the step

    def _backward(self, stage: int, number: int) -> None:
        outputs = self._under_way.pop((stage, number))
        if isinstance(outputs, Tensor):
            outputs.backward()  # type: ignore[no-untyped-call]
        else:
            torch.autograd.backward(outputs, self._gradients[stage, number])
        del outputs
        received = self._received.get((stage, number), ())
        gradients = []
        for each in received:
            gradients.append(torch.zeros_like(each) if each.grad is None else each.grad)
            each.grad = None
        if stage - 1 in self._stages:
            self._gradients[stage - 1, number] = tuple(gradients)


class _Sum:
    """An objective of one term."""

    NAME = "loss"

    def __init__(self, loss: Callable[[nn.Module, Batch], Tensor]) -> None:
        self._loss = loss

    def terms(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Run the model on a batch and return the loss as its only term."""
        return {self.NAME: self._loss(model, batch)}
