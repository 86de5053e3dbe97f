"""One stage as a module that a schedule runs: a micro-batch's number and what was received in, what is sent out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.distributed.pipeline.carried import Boundary, Carried, Loss, Passed
from mindspeed_mm.fsdp.distributed.pipeline.cut import arguments_of, entry_of, stage_of
from mindspeed_mm.fsdp.distributed.pipeline.plan import StagePlan
from mindspeed_mm.fsdp.models.forward_arguments import refusals_explained
from mindspeed_mm.fsdp.models.structure.stages import StageExit, own_names
from mindspeed_mm.fsdp.ops.forward_stack import Args, CallArguments, Kwargs


@dataclass
class StepWork:
    """A step's micro-batches, on every rank of the pipeline, and what comes of them."""

    objective: Loss
    batches: Sequence[Batch]
    denominators: Mapping[str, float]
    crossings: Sequence[list[list[Passed]]] = ()
    """Of each micro-batch, what enters each stage (`Boundary.crossings`)."""
    totals: dict[str, Tensor] = field(default_factory=dict)
    """Normalised terms so far; filled where the last stage is."""


class StageModule(nn.Module):
    """Runs the objective on one stage. It is the root of what sharding gathers; parameters of `model` keep their names.

    Args:
        part: What this rank holds of the model.
        plan: Of the whole model.
        stage: Which one.
        boundary: Of the whole model.
        dtype: Of what passes between stages.
        media: Batch keys that feed what the first stage alone has.
    """

    def __init__(
        self,
        part: nn.Module,
        plan: StagePlan,
        stage: int,
        boundary: Boundary,
        dtype: torch.dtype,
        media: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.model = stage_of(part, plan, stage, dtype)
        self.index, self.is_first, self.is_last = stage, stage == 0, stage == plan.stages - 1
        self._boundary, self._dtype = boundary, dtype
        self._media = () if self.is_first else tuple(media)
        self._carried: Carried = boundary.carried(stage)
        self._carried.attach(self.model)
        self._streams = () if self.is_first else plan.streams_into(stage)
        self._entering: tuple[Tensor, ...] = ()
        if not self.is_first:
            entry = entry_of(self.model, plan, stage)
            self._arguments = arguments_of(entry)
            entry.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        self.work: StepWork | None = None

    def cast_inputs(self, dtype: torch.dtype | None) -> None:
        """Cast floating-point arguments of the model, as sharding does for a model that is its own root."""
        if dtype is not None:
            hook = _CastInputs(dtype)
            self.model.register_forward_pre_hook(hook, with_kwargs=True)

    def names_of(self, names: Iterable[str]) -> list[str]:
        """Of these modules of the whole model those that this stage holds, by their names below it."""
        return [f"model.{name}" for name in own_names(self.model, names)]

    def forward(self, *received: Tensor, mb: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Hidden states and what travels with them; of the last stage the micro-batch's share of the loss."""
        assert self.work is not None
        batch = {key: value for key, value in self.work.batches[int(mb)].items() if key not in self._media}
        routers = self._boundary.routers
        if routers is not None:  # what they said comes last; the first stage receives nothing at all
            routers.received = received[-1] if received else None
            received = received[:-1]
        hidden = max(1, len(self._streams))
        self._entering = received[:hidden]
        self._carried.begin(received[hidden:])
        try:
            with refusals_explained(self.model, batch):
                terms = self.work.objective.terms(self.model, batch)
        except StageExit as end:
            return self._leaving(end.streams, self.work.crossings[int(mb)][self.index + 1])
        finally:
            self._entering = ()
        return self._loss(terms)

    def _enter(self, _module: nn.Module, args: Args, kwargs: Kwargs) -> CallArguments:
        given, by_name = list(args), dict(kwargs)
        for name, hidden in zip(self._streams or ("hidden_states",), self._entering, strict=True):
            place = self._arguments.index(name) if name in self._arguments else 0
            if place < len(given):
                given[place] = hidden
            else:
                by_name[name] = hidden
        return tuple(given), by_name

    def _leaving(self, streams: tuple[Tensor, ...], expected: list[Passed]) -> tuple[Tensor, ...]:
        carried = self._carried.outgoing(streams[0])
        outputs = [each.to(self._dtype).contiguous() for each in (*streams, *carried)]
        if self._boundary.routers is not None:
            outputs.append(self._boundary.routers.leaving(streams[0]))
        found = [(tuple(each.shape), each.dtype) for each in outputs]
        if found != expected:
            raise MMError(
                f"stage {self.index} hands on {found}, and the next one waits for {expected}",
                way_out="This model cannot be cut there: set parallel.pipeline_parallel_size to 1.",
            )
        # The next stage sends a gradient for everything, and splits its backward pass at what it received.
        return tuple(_differentiable(each) for each in outputs)

    def _loss(self, terms: Mapping[str, Tensor]) -> Tensor:
        assert self.work is not None
        totals, normalised = self.work.totals, []
        for name, value in terms.items():
            share = value / self.work.denominators[name]
            normalised.append(share)
            totals[name] = totals[name] + share.detach() if name in totals else share.detach()
        return torch.stack(normalised).sum()


class _CastInputs:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, _module: nn.Module, args: Args, kwargs: Kwargs) -> CallArguments:
        def cast(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point():
                return tensor.to(self._dtype)
            return tensor

        return tree_map_only(Tensor, cast, args), tree_map_only(Tensor, cast, kwargs)


def _differentiable(tensor: Tensor) -> Tensor:
    if tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    return tensor.detach().requires_grad_(True)
