"""Keeps ranks in step when some of them have no image, video or audio in a micro-batch.

A sharded tower is gathered by all ranks together, so a rank without input for it must run it too: on the smallest input
of zeros, its outputs multiplied by zero and added to the decoder's input. Loss and gradients stay exactly those of the
plain model. All ranks run their towers in one order, or one would gather its audio tower while another gathers its
vision tower.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError, MMError
from mindspeed_mm.fsdp.ops.forward_stack import Args, CallArguments, Kwargs

MUST_AGREE = "Give every row such a medium, or none, or train in one process."


def _without(key: str) -> str:
    return f"no {key}"


def _feeds(batch: Mapping[str, object], key: str) -> bool:
    return batch.get(key) is not None


class TowerDescription(Protocol):
    """What is asked of a model's description of one modality."""

    @property
    def name(self) -> str:
        """The modality: image, video, audio."""

    @property
    def module(self) -> str:
        """Name of the tower's module; several modalities may share one."""

    @property
    def key(self) -> str:
        """The batch key that feeds the tower."""

    @property
    def decoder(self) -> str:
        """Name of the module that takes `inputs_embeds`."""

    @property
    def embedding(self) -> str:
        """Name of the token embedding, where the decoder makes its `inputs_embeds` itself; else empty."""

    def run_idle(self, model: nn.Module) -> Sequence[torch.Tensor]:
        """Run the tower on the smallest legal input of zeros, and return every tensor that it hands to the decoder."""


@dataclass(frozen=True)
class IdlePlan:
    """What a model reads beside tokens, of which ranks may have none in a step."""

    towers: tuple[TowerDescription, ...] = ()
    """One entry a modality, in the order in which the model calls them; several may feed the same module."""
    must_agree: tuple[str, ...] = ()
    """Keys of media for whose towers nothing can stand in: all ranks must have them together, or none."""

    def __bool__(self) -> bool:
        return bool(self.towers or self.must_agree)


NO_IDLE_TOWERS = IdlePlan()


class IdleTowers:
    """Hooks that run the towers of modalities which this rank lacks and another rank has.

    Args:
        model: The root module, called with the batch as keyword arguments. Not sharded yet: these hooks must stand
            before those of sharding.
        plan: What ranks may lack.
        runs: False on a stage of a pipeline that has no towers: what it reads is counted all the same.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: IdlePlan,
        *,
        runs: bool = True,
    ) -> None:
        self._model = model
        self._without_towers, self._towers = plan.must_agree, plan.towers
        self._active: frozenset[str] = frozenset()
        self._waiting: list[tuple[TowerDescription, bool]] = []
        """Towers that are still to run in this pass, in order, and whether the model itself will run them."""
        self._outputs: list[torch.Tensor] = []
        self._runs_idle = self._stands_in_front = False
        self.followers: list[IdleTowers] = []
        """Of further models that go through the same micro-batches: `set_active` reaches them too."""
        if not runs:
            return
        model.register_forward_pre_hook(self._note_missing, with_kwargs=True)
        for decoder in {tower.decoder for tower in plan.towers if not tower.embedding}:
            model.get_submodule(decoder).register_forward_pre_hook(self._add_idle_outputs, with_kwargs=True)

    def present(self, batches: Sequence[Batch]) -> Mapping[str, bool]:
        """Modality → whether any of these micro-batches feeds it. Of media without
        towers also whether any lacks them.
        """
        found = {}
        for tower in self._towers:
            found[tower.name] = any(_feeds(batch, tower.key) for batch in batches)
        for key in self._without_towers:
            fed = [_feeds(batch, key) for batch in batches]
            # Both answers, since ranks are joined by "any": the step is mixed where both are true.
            found[key], found[_without(key)] = any(fed), not all(fed)
        return found

    def set_active(self, names: Collection[str]) -> None:
        """The modalities that any rank has in this step. A tower that no rank needs must not run: zero gradients would
        let the optimizer decay its weights, where a single process leaves them alone.

        Every rank calls it with the same names before the forward passes of a step, validation included. A process on
        its own has no other rank to keep in step with, and runs no idle tower.

        Raises:
            ConfigError: Some micro-batches have media without towers and some have none.
        """
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        mixed = [key for key in self._without_towers if {key, _without(key)} <= set(names)]
        if mixed and not alone:
            name, keys = type(self._model).__name__, ", ".join(mixed)
            raise ConfigError(
                f"{name}: some micro-batches of this step have {keys} and some have none",
                key="data.dataset_param",
                way_out=MUST_AGREE,
            )
        if alone:
            names = ()
        self._active = frozenset(names)
        for follower in self.followers:
            follower.set_active(names)

    def _note_missing(self, _model: nn.Module, _args: Args, batch: Kwargs) -> None:
        if not self._stands_in_front:
            self._stand_in_front()
        self._waiting, self._outputs = [], []
        for tower in self._towers:
            if tower.name in self._active:
                self._waiting.append((tower, _feeds(batch, tower.key)))

    def _stand_in_front(self) -> None:
        """Sharding puts its hooks in front of those that are there, and gathers a tower before they run: so these are
        put in front of its, once it is done."""
        for name in {tower.module for tower in self._towers}:
            hook = partial(self._run_earlier, name)
            self._model.get_submodule(name).register_forward_pre_hook(hook, prepend=True)
        for name in {tower.embedding for tower in self._towers if tower.embedding}:  # and these behind its own
            self._model.get_submodule(name).register_forward_hook(self._add_behind_embedding)
        self._stands_in_front = True

    def _run_earlier(self, name: str, _module: nn.Module, _args: Args) -> None:
        """The model is about to run a tower of its own accord: idle ones in front of it come first."""
        if self._runs_idle:
            return
        # Those in front of the tower run now, it runs by itself, and those behind it wait for their turn.
        for place, (tower, is_fed) in enumerate(self._waiting):
            if is_fed and tower.module == name:
                earlier, self._waiting = self._waiting[:place], self._waiting[place + 1 :]
                self._run_idle(earlier)
                return

    def _run_idle(self, towers: Sequence[tuple[TowerDescription, bool]]) -> None:
        self._runs_idle = True
        try:
            for tower, is_fed in towers:
                if not is_fed:
                    self._outputs += tower.run_idle(self._model)
        finally:
            self._runs_idle = False

    def _add_idle_outputs(self, decoder: nn.Module, args: Args, kwargs: Kwargs) -> CallArguments | None:
        waiting, self._waiting = self._waiting, []
        embeds = kwargs.get("inputs_embeds")
        idle = [tower.name for tower, is_fed in waiting if not is_fed]
        if embeds is None and (idle or self._outputs):
            raise MMError(
                f"{type(decoder).__name__} was called without inputs_embeds",
                way_out=f"get_towers of its model names it as the decoder of {', '.join(idle)}. Call it with "
                "`inputs_embeds=` by name, or name the module that takes it.",
            )
        self._run_idle(waiting)
        if embeds is None or not self._outputs:
            return None
        return args, {**kwargs, "inputs_embeds": embeds + self._take_nothing().to(embeds.dtype)}

    def _add_behind_embedding(self, _module: nn.Module, _args: Args, embeds: torch.Tensor) -> torch.Tensor | None:
        """The model has embedded its tokens, and would now go on to its pictures."""
        if self._runs_idle:
            return None
        waiting, self._waiting = self._waiting, []
        self._run_idle(waiting)
        if not self._outputs:
            return None
        return embeds + self._take_nothing().to(embeds.dtype)

    def _take_nothing(self) -> torch.Tensor:
        """Zero, with the gradients of what idle towers have returned."""
        outputs, self._outputs = self._outputs, []
        # Times zero, not left out: the backward pass must reach the tower, whose gradients all ranks reduce together.
        return torch.stack([(output * 0).sum() for output in outputs]).sum()
