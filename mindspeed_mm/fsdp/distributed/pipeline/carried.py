"""What travels between stages beside the hidden states: outputs of the first stage that later ones need, too.

Tensors are handed on unchanged by the stages between, so that gradients of all stages that use them meet on the way
back.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.distributed.pipeline.cut import (
    PlaceholderFront,
    ReceivedOutputs,
    all_in_front,
    arguments_of,
    entry_of,
    hidden_among,
    replace_module,
    tensors_among,
)
from mindspeed_mm.fsdp.distributed.pipeline.plan import StagePlan
from mindspeed_mm.fsdp.models.structure.stages import RouterPassing, StageExit
from mindspeed_mm.fsdp.ops.context_attention.share import CONTEXT_KEY
from mindspeed_mm.fsdp.ops.forward_stack import Args, CallArguments, Kwargs
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, weight_of

Shape = tuple[int, ...]
Passed = tuple[Shape, torch.dtype]
"""Shape and type of a tensor that passes from one stage to the next."""


class Loss(Protocol):
    """What a stage asks of an objective."""

    def terms(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Run the model; each term's sum over a micro-batch."""
        ...


class Carried:
    """Nothing is carried. One object a stage; the tensors in it are those of the micro-batch that runs.

    Args:
        plan: Of the whole model.
        stage: Whose it is.
    """

    def __init__(self, plan: StagePlan, stage: int) -> None:
        self._plan, self._stage = plan, stage
        self.received: tuple[Tensor, ...] = ()

    def attach(self, model: nn.Module) -> None:
        """Register what notes, or hands in, the tensors; on the stage's model, before it is sharded."""

    def begin(self, received: tuple[Tensor, ...]) -> None:
        """The next micro-batch, with what came in of it."""
        self.received = received

    def outgoing(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """What leaves this stage beside `hidden`."""
        return ()

    @property
    def _is_first(self) -> bool:
        return self._stage == 0


class CarriedOutputs(Carried):
    """Outputs of modules that only the first stage has, for all others: conditions of a generator.

    Args:
        plan: Names the modules.
        stage: Whose it is.
    """

    def __init__(self, plan: StagePlan, stage: int) -> None:
        super().__init__(plan, stage)
        self._noted: list[Tensor] = []
        self._handed_in = 0

    def attach(self, model: nn.Module) -> None:
        """Hooks on the modules, or placeholders for them."""
        held = dict(model.named_modules())
        for name in self._plan.points.carried:
            module = held.get(name)
            if isinstance(module, PlaceholderFront):
                replace_module(model, name, ReceivedOutputs(module, self._next))
            elif module is not None:
                module.register_forward_hook(self._note)

    @override
    def begin(self, received: tuple[Tensor, ...]) -> None:
        super().begin(received)
        self._noted, self._handed_in = [], 0

    def outgoing(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """What the first stage noted, or what came in."""
        if self._is_first:
            return tuple(self._noted)
        return self.received

    def _note(self, _module: nn.Module, _inputs: object, outputs: object) -> None:
        self._noted += tensors_among(outputs)

    def _next(self) -> Tensor:
        """Modules are called in the same order on every stage."""
        self._handed_in += 1
        return self.received[self._handed_in - 1]


class CarriedDeepstack(Carried):
    """Features of a vision tower that are added behind the decoder's first layers (DeepStack, arXiv 2406.04334).

    They travel as (B, L, H) with zeros for text, and only while a layer is ahead that they are added behind: a stage
    with more layers than there are levels leaves nothing to carry.

    Args:
        plan: Of the whole model.
        stage: Whose it is.
        decoder: Name of the module that takes them.
        levels: How many there are.
    """

    def __init__(self, plan: StagePlan, stage: int, decoder: str, levels: int) -> None:
        super().__init__(plan, stage)
        self._decoder, self._levels = decoder, levels
        self._features: list[Tensor] | None = None
        self._places: Tensor | None = None

    def attach(self, model: nn.Module) -> None:
        """A hook in front of the decoder."""
        hook = self._note if self._is_first else self._hand_in
        model.get_submodule(self._decoder).register_forward_pre_hook(hook, with_kwargs=True)

    def count(self, stage: int) -> int:
        """Levels whose layer this stage or a later one has."""
        if stage == 0:
            return 0
        return max(0, self._levels - self._plan.layers_of(stage).start)

    def outgoing(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Levels that are still ahead of the next stage."""
        ahead = self.count(self._stage + 1)
        if ahead == 0:
            return ()
        if not self._is_first:
            return self.received[-ahead:]
        if self._features is None:  # no image in this micro-batch
            return tuple(torch.zeros_like(hidden) for _ in range(ahead))
        assert self._places is not None
        return tuple(
            torch.zeros_like(hidden).masked_scatter(self._places[..., None], each.to(hidden.dtype))
            for each in self._features[self._levels - ahead :]
        )

    def _note(self, _module: nn.Module, _args: object, kwargs: Kwargs) -> None:
        self._features, self._places = kwargs.get("deepstack_visual_embeds"), kwargs.get("visual_pos_masks")

    def _hand_in(self, _module: nn.Module, args: Args, kwargs: Kwargs) -> CallArguments | None:
        if not self.received:
            return None
        rows = self.received[0].flatten(0, -2)
        # Levels behind earlier layers are added to what is thrown away at the entry.
        passed = [torch.zeros_like(rows)] * (self._levels - len(self.received))
        everywhere = torch.ones(self.received[0].shape[:-1], dtype=torch.bool, device=rows.device)
        features = [*passed, *(each.flatten(0, -2) for each in self.received)]
        return args, {**kwargs, "visual_pos_masks": everywhere, "deepstack_visual_embeds": features}


class Boundary:
    """Shapes and types of what passes from one stage to the next, known before a micro-batch runs.

    Args:
        model: The whole model.
        plan: Its stages.
        dtype: Of hidden states.
    """

    def __init__(self, model: nn.Module, plan: StagePlan, dtype: torch.dtype) -> None:
        self._plan, self._dtype = plan, dtype
        self.routers: RouterPassing | None = None
        """What routers say across stages, where a term asks for it."""
        self._width = 0
        self._decoder, self._levels = "", 0
        self._front = None
        if plan.points.embedding:
            embedding = model.get_submodule(plan.points.embedding)
            self._width = weight_of(embedding).shape[1]
            self._decoder, self._levels = _deepstack_of(model, plan)
        else:
            self._front = FrontOfStages(model, plan, dtype)

    def carried(self, stage: int) -> Carried:
        """What a stage hands on."""
        if self._front is not None:
            return CarriedOutputs(self._plan, stage)
        if self._levels:
            return CarriedDeepstack(self._plan, stage, self._decoder, self._levels)
        return Carried(self._plan, stage)

    def crossings(self, loss: Loss, batch: Batch) -> list[list[Passed]]:
        """What enters each stage: the hidden states first, what routers say last; nothing enters the first.

        Args:
            loss: How the model is called with a micro-batch.
            batch: The micro-batch, on the device.
        """
        shapes = self._front.shapes(loss, batch) if self._front is not None else self._of_decoder(batch)
        crossings: list[list[Passed]] = [[]]
        for entering in shapes:
            passed: list[Passed] = [(shape, self._dtype) for shape in entering]
            if self.routers is not None:
                passed.append(((self.routers.numbers,), self.routers.dtype))
            crossings.append(passed)
        return crossings

    def _of_decoder(self, batch: Batch) -> list[list[Shape]]:
        """Hidden states, and what is carried with them, for each stage behind the first."""
        hidden = self._hidden_shape(batch)
        if not self._levels:
            return [[hidden]] * (self._plan.stages - 1)
        deepstack = CarriedDeepstack(self._plan, 0, self._decoder, self._levels)
        return [[hidden] * (1 + deepstack.count(stage)) for stage in range(1, self._plan.stages)]

    def _hidden_shape(self, batch: Batch) -> Shape:
        rows, tokens = batch["input_ids"].shape
        share = batch.get(CONTEXT_KEY)
        if share is not None:
            tokens = len(share.positions)
        return rows, tokens, self._width


class FrontOfStages:
    """What a generator computes in front of its layers, in shape: run once for each micro-batch before it, for what
    will pass between stages.

    Args:
        model: Whole.
        plan: Its stages.
        dtype: Of hidden states.
    """

    def __init__(self, model: nn.Module, plan: StagePlan, dtype: torch.dtype) -> None:
        self._model = all_in_front(model, plan, dtype)
        self._entering: list[list[Shape]] = []
        self._carried: list[Shape] = []
        for stage in range(1, plan.stages):
            entry = entry_of(self._model, plan, stage)
            entry.register_forward_pre_hook(partial(self._enter, plan.streams_into(stage)), with_kwargs=True)
        held = dict(self._model.named_modules())
        for name in plan.points.carried:
            if name in held:
                held[name].register_forward_hook(self._carry)

    @torch.no_grad()
    def shapes(self, loss: Loss, batch: Batch) -> list[list[Shape]]:
        """Of what enters each stage behind the first."""
        self._entering, self._carried = [], []
        device = next(each.device for each in batch.values() if isinstance(each, Tensor))
        try:
            loss.terms(self._model.to(device), batch)
        except StageExit:
            return [[*entering, *self._carried] for entering in self._entering]
        raise AssertionError("the skeleton of a model ends in front of its last modules")

    def _enter(self, streams: tuple[str, ...], module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        hidden = hidden_among(arguments_of(module), streams, args, kwargs)
        self._entering.append([tuple(each.shape) for each in hidden])

    def _carry(self, _module: nn.Module, _inputs: object, outputs: object) -> None:
        self._carried += [tuple(each.shape) for each in tensors_among(outputs)]


def _deepstack_of(model: nn.Module, plan: StagePlan) -> tuple[str, int]:
    """(decoder, levels); no levels where the decoder takes none."""
    decoder = next(iter(plan.points.layers)).rpartition(".")[0]
    if "deepstack_visual_embeds" not in inspect.signature(model.get_submodule(decoder).forward).parameters:
        return decoder, 0
    return decoder, len(attribute_at(model, "config.vision_config.deepstack_visual_indexes", ()))
