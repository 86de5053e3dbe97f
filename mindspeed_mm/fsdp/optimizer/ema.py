"""An exponential moving average of the weights that are trained, kept as they are: shard by shard, each on its rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.models.loading.local_shard import local
from mindspeed_mm.fsdp.models.structure.stages import holders_of
from mindspeed_mm.fsdp.params.diffusion_args import EmaArguments


def decay_at(step: int, args: EmaArguments) -> float:
    """Share of the old average that stays in the update after step `step`: d ^ interval.

    d is `decay`, with `warmup` min(decay, (1 + step) / (10 + step)). The power makes the average reach back over the
    same number of steps whatever the interval is.
    """
    decay = args.decay
    if args.warmup:
        decay = min(decay, (1 + step) / (10 + step))
    return float(decay**args.interval)


class Ema:
    """Average of the trainable parameters; it starts as a copy of them. Nothing here communicates or waits for the
    device.

    Args:
        model: Under any plan, its parameters off the meta device.
        args: The `training.ema` section.
    """

    key, called = "ema", "average of the weights"
    """Its name in checkpoints, and in words."""
    is_result = True
    """Whether evaluations and exports are of it."""

    def __init__(self, model: nn.Module, args: EmaArguments) -> None:
        self.model, self._interval = model, args.interval
        self._decay: Callable[[int], float] = lambda step: decay_at(step, args)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._average = {name: _copy(parameter) for name, parameter in self._parameters.items()}
        self._is_applied = False

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the weights: a ← d a + (1 − d) w, with d from `decay_at`.

        Args:
            step: Steps done by the run, this one included; call it when the optimizer has stepped. Between two
                multiples of `interval` nothing happens.
        """
        self._refuse_while_applied("updated")
        if step % self._interval:
            return
        share = 1 - self._decay(step)
        moved: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for average, weights in self._local_pairs():
            if average.dtype == weights.dtype:
                moved.append(average)
                targets.append(weights)
            else:  # one at a time: a cast is a copy
                average.lerp_(weights.to(average.dtype), share)
        if moved:
            torch._foreach_lerp_(moved, targets, share)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The average by parameter name, sharded as the parameters are, fp32 (fp64 of fp64 parameters); they alias its
        memory, so what is written into them is loaded."""
        self._refuse_while_applied("read")
        return dict(self._average)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over an average.

        Args:
            tensors: Names, shapes and layout as in `tensors()`.

        Raises:
            MMError: They are not those of this model's trainable parameters; nothing was changed.
        """
        self._refuse_while_applied("loaded")
        differing = []
        for name in sorted(tensors.keys() | self._average.keys()):
            given, own = tensors.get(name), self._average.get(name)
            if given is None or own is None or given.shape != own.shape:
                differing.append(name)
        if differing:
            raise MMError(f"is not the average of this model: {len(differing)} tensors differ", where=differing[0])
        for name, average in self._average.items():
            average.copy_(tensors[name])

    def restart(self) -> None:
        """Begin again from the weights as they are now."""
        self.load({name: parameter.detach() for name, parameter in self._parameters.items()})

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While inside, the model's weights are the average; afterwards they are what they were, bit for bit.

        Weights and average change places tensor by tensor, so that no second copy of the model is made (where the two
        differ in dtype, the weights are kept aside). Inside, forward passes may run, on all ranks together; nothing
        that changes weights may.

        Raises:
            MMError: It is entered a second time.
        """
        self._refuse_while_applied("applied again")
        self._is_applied = True
        exchanged: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        try:
            self._exchange(exchanged)
            yield
        finally:
            self._undo(exchanged)
            self._is_applied = False

    @torch.no_grad()
    def _exchange(self, done: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]) -> None:
        """Fill `done` with (weights, average, weights kept aside) of what has changed places."""
        _forget_gathered(self.model)
        for average, weights in self._local_pairs():
            if average.dtype == weights.dtype:
                _swap(average, weights)
                done.append((weights, average, None))
            else:
                done.append((weights, average, weights.clone()))
                weights.copy_(average)

    @torch.no_grad()
    def _undo(self, done: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]) -> None:
        _forget_gathered(self.model)
        for weights, average, aside in done:
            if aside is None:
                _swap(average, weights)
            else:
                weights.copy_(aside)

    def _local_pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(average, weights) of this rank. Asked for every time: sharding may lay a shard into new memory."""
        return [(local(self._average[name]), local(parameter)) for name, parameter in self._parameters.items()]

    def _refuse_while_applied(self, action: str) -> None:
        if self._is_applied:
            raise MMError(f"the average of the weights is in the model now and cannot be {action}")


class OldPolicy(Ema):
    """The policy that draws samples: a slower copy of the one that is trained (DiffusionNFT, arXiv 2509.16117).

    Args:
        model: As above.
        interval: Steps after which it moves: those of a rollout, whose samples are used up then.
        decay: Step → share of the old policy that stays.
    """

    key, called = "old_policy", "old policy"
    is_result = False

    def __init__(self, model: nn.Module, interval: int, decay: Callable[[int], float]) -> None:
        super().__init__(model, EmaArguments(interval=interval))
        self._decay = decay


class MovingReference(OldPolicy):
    """The policy that the trained one is compared with, where it follows: every so many steps it becomes a mixture of
    both (TR-DPO, arXiv:2404.09656)."""

    key, called = "reference", "reference"


def _copy(parameter: nn.Parameter) -> torch.Tensor:
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return parameter.detach().to(dtype, copy=True)


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """In place: sharding holds on to the memory of its shards."""
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def _forget_gathered(model: nn.Module) -> None:
    """Modules may stay gathered after a forward pass without a backward one; what they gathered is out of date once the
    shards change."""
    for holder in holders_of(model):
        for module in holder.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
