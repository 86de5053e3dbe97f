"""Keeps ranks in step when some of them have no image, video or audio in a micro-batch.

A sharded tower is gathered by all ranks together, so a rank without input for it must run it too: on the smallest input
of zeros, its outputs multiplied by zero and added to the decoder's input. Loss and gradients stay exactly those of the
plain model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import MMError


class Tower(Protocol):
    """What is asked of a model's description of one modality."""

    @property
    def name(self) -> str:
        """The modality: image, video, audio."""

    @property
    def key(self) -> str:
        """The batch key that feeds the tower."""

    @property
    def decoder(self) -> str:
        """Name of the module that takes `inputs_embeds`."""

    def run_idle(self, model: nn.Module) -> Sequence[torch.Tensor]:
        """Run the tower on the smallest legal input of zeros, and return every tensor that it hands to the decoder."""


class IdleTowers:
    """Hooks that run the towers of modalities which this rank lacks and another rank has.

    Args:
        model: The root module, called with the batch as keyword arguments. Not sharded yet: these hooks must stand
            before those of sharding.
        towers: One entry a modality; several may feed the same module.
        runs: False on a stage of a pipeline that has no towers: what it reads is counted all the same.
    """

    def __init__(self, model: nn.Module, towers: Sequence[Tower], *, runs: bool = True) -> None:
        self._model = model
        self._towers = tuple(towers)
        self._active: frozenset[str] = frozenset()
        self._idle: list[Tower] = []
        if not runs:
            return
        model.register_forward_pre_hook(self._note_missing, with_kwargs=True)
        for decoder in {tower.decoder for tower in towers}:
            model.get_submodule(decoder).register_forward_pre_hook(self._add_idle_outputs, with_kwargs=True)

    def present(self, batches: Sequence[Batch]) -> Mapping[str, bool]:
        """Modality → whether any of these micro-batches feeds it."""
        return {t.name: any(batch.get(t.key) is not None for batch in batches) for t in self._towers}

    def set_active(self, names: Collection[str]) -> None:
        """The modalities that any rank has in this step. A tower that no rank needs must not run: zero gradients would
        let the optimizer decay its weights, where a single process leaves them alone.

        Every rank calls it with the same names before the forward passes of a step, validation included. A process on
        its own has nobody to keep in step with, and runs no tower for nothing.
        """
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._active = frozenset() if alone else frozenset(names)

    def _note_missing(self, _model: nn.Module, _args: tuple[Any, ...], batch: dict[str, Any]) -> None:
        # In the order of `towers`, which is the same on every rank.
        self._idle = [t for t in self._towers if t.name in self._active and batch.get(t.key) is None]

    def _add_idle_outputs(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        idle, self._idle = self._idle, []
        if not idle:
            return None
        embeds = kwargs.get("inputs_embeds")
        if embeds is None:
            raise MMError(
                f"{type(decoder).__name__} was called without inputs_embeds",
                way_out=f"Its model's description names it as the decoder of {', '.join(t.name for t in idle)}.",
            )
        outputs = [output for tower in idle for output in tower.run_idle(self._model)]
        nothing = torch.stack([(output * 0).sum() for output in outputs]).sum()
        return args, {**kwargs, "inputs_embeds": embeds + nothing.to(embeds.dtype)}
