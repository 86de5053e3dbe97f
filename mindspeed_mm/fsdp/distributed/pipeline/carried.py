"""What travels between stages beside the hidden states: outputs of the first stage that later ones need, too.

Tensors are handed on unchanged by the stages between, so that gradients of all who use them meet on the way back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.distributed.pipeline.cut import ReceivedOutputs, replace_module
from mindspeed_mm.fsdp.distributed.pipeline.plan import StagePlan
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.ops.context_attention.share import CONTEXT_KEY
from mindspeed_mm.fsdp.ops.forward_stack import CallArguments
from mindspeed_mm.fsdp.ops.stages import RouterPassing

Shape = tuple[int, ...]
Passed = tuple[Shape, torch.dtype]
"""Shape and type of a tensor that passes from one stage to the next."""


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

    def count(self, batch: Batch, stage: int) -> int:
        """How many tensors enter a stage."""
        return 0

    def outgoing(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """What leaves this stage beside `hidden`."""
        return ()

    @property
    def _is_first(self) -> bool:
        return self._stage == 0


class CarriedOutputs(Carried):
    """Outputs of a module that only the first stage has, for all others: conditions of a generator.

    Args:
        plan: Names the module.
        stage: Whose it is.
        tensors: Micro-batch → how many of the module's outputs are tensors; those behind them are None.
    """

    def __init__(self, plan: StagePlan, stage: int, tensors: Callable[[Batch], int]) -> None:
        super().__init__(plan, stage)
        self._tensors = tensors
        self._noted: tuple[Any, ...] = ()

    def attach(self, model: nn.Module) -> None:
        """A hook on the module, or a placeholder for it."""
        name = self._plan.points.carried
        module = model.get_submodule(name)
        if self._is_first:
            module.register_forward_hook(self._note)
        else:
            replace_module(model, name, ReceivedOutputs(module, self._handed_in))

    def count(self, batch: Batch, stage: int) -> int:
        """The same for all stages."""
        return self._tensors(batch)

    def outgoing(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """What the first stage noted, or what came in."""
        if not self._is_first:
            return self.received
        return tuple(each for each in self._noted if each is not None)

    def _note(self, _module: nn.Module, _inputs: Any, outputs: tuple[Any, ...]) -> None:
        self._noted = outputs

    def _handed_in(self) -> tuple[Any, ...]:
        return (*self.received, *[None] * (self._plan.points.carried_outputs - len(self.received)))


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

    def count(self, batch: Batch, stage: int) -> int:
        """Levels whose layer this stage or a later one has."""
        return max(0, self._levels - self._plan.layers_of(stage).start) if stage else 0

    def outgoing(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Levels that are still ahead of the next stage."""
        ahead = self.count({}, self._stage + 1)
        if not self._is_first:
            return self.received[len(self.received) - ahead :] if ahead else ()
        if not ahead:
            return ()
        if self._features is None:  # no image in this micro-batch
            return tuple(torch.zeros_like(hidden) for _ in range(ahead))
        assert self._places is not None
        return tuple(_spread(each, self._places, hidden) for each in self._features[self._levels - ahead :])

    def _note(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        self._features, self._places = kwargs.get("deepstack_visual_embeds"), kwargs.get("visual_pos_masks")

    def _hand_in(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments | None:
        if not self.received:
            return None
        rows = self.received[0].flatten(0, -2)
        # Levels behind earlier layers are added to what is thrown away at the entry.
        passed = [torch.zeros_like(rows)] * (self._levels - len(self.received))
        everywhere = torch.ones(self.received[0].shape[:-1], dtype=torch.bool, device=rows.device)
        features = [*passed, *(each.flatten(0, -2) for each in self.received)]
        return args, {**kwargs, "visual_pos_masks": everywhere, "deepstack_visual_embeds": features}


def _spread(features: Tensor, places: Tensor, hidden: Tensor) -> Tensor:
    return torch.zeros_like(hidden).masked_scatter(places[..., None], features.to(hidden.dtype))


class Boundary:
    """Shapes and types of what passes from one stage to the next, from the micro-batch alone.

    Args:
        model: The whole model.
        plan: Its stages.
        dtype: Of hidden states.
    """

    def __init__(self, model: nn.Module, plan: StagePlan, dtype: torch.dtype) -> None:
        self._plan, self._dtype = plan, dtype
        self.routers: RouterPassing | None = None
        """What routers say across stages, where a term asks for it."""
        self._adapter = facts_of(model).adapter
        self._width = 0
        self._decoder, self._levels = "", 0
        if self._adapter is None:
            embedding = model.get_submodule(plan.points.embedding)
            self._width = int(getattr(embedding, "base_layer", embedding).weight.shape[1])  # type: ignore[union-attr, arg-type]
            self._decoder, self._levels = _deepstack_of(model, plan)

    def carried(self, stage: int) -> Carried:
        """What a stage hands on."""
        if (adapter := self._adapter) is not None:
            return CarriedOutputs(self._plan, stage, lambda batch: len(adapter.stage_shapes(batch)) - 1)
        if self._levels:
            return CarriedDeepstack(self._plan, stage, self._decoder, self._levels)
        return Carried(self._plan, stage)

    def tensors(self, batch: Batch, stage: int) -> list[Passed]:
        """What enters a stage, the hidden states first, what routers say last; nothing enters the first."""
        if stage == 0:
            return []
        beside = [] if self.routers is None else [((self.routers.numbers,), self.routers.dtype)]
        return [(shape, self._dtype) for shape in self._shapes(batch, stage)] + beside

    def _shapes(self, batch: Batch, stage: int) -> list[Shape]:
        """Of the hidden states and what is carried with them."""
        if self._adapter is not None:
            return list(self._adapter.stage_shapes(batch))
        hidden = self._hidden_shape(batch)
        return [hidden] * (1 + self.carried(stage).count(batch, stage))

    def _hidden_shape(self, batch: Batch) -> Shape:
        rows, tokens = batch["input_ids"].shape
        share = batch.get(CONTEXT_KEY)
        return (rows, tokens if share is None else len(share.positions), self._width)


def _deepstack_of(model: nn.Module, plan: StagePlan) -> tuple[str, int]:
    """(decoder, levels); no levels where the decoder takes none."""
    decoder = plan.points.layers.rpartition(".")[0]
    vision: Any = getattr(getattr(model, "config", None), "vision_config", None)
    levels = getattr(vision, "deepstack_visual_indexes", None) or ()
    takes = inspect.signature(model.get_submodule(decoder).forward).parameters
    return decoder, len(levels) if "deepstack_visual_embeds" in takes else 0
