"""The critic of a distillation, a second model that is trained, with an optimizer and a schedule of its own; and a step
that trains the critic first and the student then."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.checkpoint.base_weights import weights_folder_of_load
from mindspeed_mm.fsdp.distributed.torch_parallelize import set_gradient_sync
from mindspeed_mm.fsdp.loss.objectives import Terms
from mindspeed_mm.fsdp.optimizer.build import build_optimizer
from mindspeed_mm.fsdp.optimizer.clip_grad import clip_grads_, grad_norm
from mindspeed_mm.fsdp.optimizer.groups import set_lr
from mindspeed_mm.fsdp.optimizer.schedules import Schedule
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.train.assemble import assemble
from mindspeed_mm.fsdp.train.distillation.critic_start import critic_folder, critic_key, critic_start, told_of_critic
from mindspeed_mm.fsdp.train.distillation.objective import CRITIC, STUDENT, DistillationObjective
from mindspeed_mm.fsdp.train.reference import check_same_inputs
from mindspeed_mm.fsdp.train.step.forward_backward import ForwardBackward


@dataclass
class Critic:
    """What learns to tell how samples of the student are distributed."""

    model: nn.Module
    """Sharded as the student is."""
    optimizer: torch.optim.Optimizer
    clip_grad: float
    clip_foreach: bool
    steps: int = 0
    """Optimizer steps of the run that are done."""

    def update(self) -> torch.Tensor:
        """Take the gradients that were added up, unless they are not finite; returns their norm, of all ranks."""
        parameters = list(self.model.parameters())
        norm = grad_norm(parameters)
        if math.isfinite(float(norm)):
            if self.clip_grad > 0:
                clip_grads_(parameters, norm, self.clip_grad, foreach=self.clip_foreach)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def build_critic(
    arguments: Arguments, student: nn.Module, device: torch.device, *, note: Callable[[str], None]
) -> Critic:
    """The critic as training starts it.

    Args:
        arguments: The whole configuration.
        student: The model that is distilled.
        device: Where its parameters live.
        note: Shows a sentence to the user.

    Raises:
        MMError: It cannot be built, has no weights, or reads other batches than the student.
    """
    start, folder = critic_start(arguments), critic_folder(arguments.posttrain)
    weights = None if folder else weights_folder_of_load(arguments.training.load)
    with told_of_critic(arguments.posttrain):
        assembled = assemble(start, device, weights=weights)
    check_same_inputs(student, assembled.model, folder, critic_key(arguments.posttrain))
    optimizer = build_optimizer(assembled.model, start.training, start.features, assembled.plan.groups, note=note)
    return Critic(assembled.model, optimizer, start.training.clip_grad, start.training.clip_grad_foreach)


class DistillationForwardBackward:
    """Updates the critic some times, each on micro-batches of its own, then computes the student's gradients on the
    last ones.

    Args:
        inner: What is done with the student's micro-batches.
        student: Draws what the critic learns.
        critic: Has its optimizer.
        objective: Of both.
        schedule: Learning rate of the critic by step.
        updates: Of the critic in a step.
    """

    def __init__(
        self,
        inner: ForwardBackward,
        student: nn.Module,
        critic: Critic,
        objective: DistillationObjective,
        schedule: Schedule,
        updates: int,
    ) -> None:
        self._inner, self._student, self._critic = inner, student, critic
        self._objective, self._schedule, self._updates = objective, schedule, updates

    def __call__(self, micro_batches: Sequence[Batch], denominators: Mapping[str, float]) -> Terms:
        """Train the critic, and accumulate the student's gradients.

        Returns:
            This rank's share of the student's normalised loss, and of the critic's, the mean over its updates. Each
            update counts its samples alike, as if all updates had as many. The critic's is NaN where a gradient of it
            was not finite, so that the step is told, and skipped or stopped at, as any other that is not.
        """
        size = len(micro_batches) // (self._updates + 1)
        step = self._critic.steps
        set_lr(self._critic.optimizer, self._schedule.at(step))
        of_critic = torch.zeros((), dtype=torch.float64)
        for index in range(self._updates):
            self._objective.begin(CRITIC, step * self._updates + index)
            own = micro_batches[index * size : (index + 1) * size]
            of_critic = of_critic + self._train_critic(own, denominators[CRITIC] / self._updates)
        self._objective.begin(STUDENT, step)
        terms = self._inner(micro_batches[self._updates * size :], denominators)
        self._critic.steps = step + 1
        value = of_critic / self._updates
        return {**terms, CRITIC: value.to(terms[STUDENT])}

    def evaluate(self, micro_batches: Sequence[Batch]) -> Terms:
        """Return the inner strategy's sums of terms; nothing is trained."""
        return self._inner.evaluate(micro_batches)

    def _train_critic(self, micro_batches: Sequence[Batch], denominator: float) -> torch.Tensor:
        critic, total = self._critic, torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(micro_batches):
            if len(micro_batches) > 1:
                set_gradient_sync(critic.model, index == len(micro_batches) - 1)
            loss = self._objective.critic_loss(self._student, batch) / denominator
            loss.backward()
            total = total.to(loss.device) + loss.detach()
        norm = critic.update()
        if math.isfinite(float(norm)):
            return total
        return torch.full_like(total, torch.nan)
