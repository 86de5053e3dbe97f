"""The generator that draws rollouts: its transformer, its encoders, and the other policies that it can become."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.data.datasets.generation_prompts.prompt_dataset import PromptRow
from mindspeed_mm.fsdp.models.diffusion.adapter import TextFeatures
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser, GuidedDenoiser, blank_text

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_PROMPTS_KEPT = 1024
"""Features of the prompts drawn last are kept on the host."""

Switch = Callable[[], AbstractContextManager[Any]]
"""Puts other values into the model while it is entered; gives the model that has them, or nothing."""


@dataclass(frozen=True)
class FlowModel:
    """The generator that is trained, as far as rollouts need it."""

    model: nn.Module
    """The transformer, with its values."""
    denoise: Denoiser
    """The path through it."""
    encoders: DiffusionPipeline
    """From `load_encoders`; they stay on the host but while they work."""
    own: Callable[[Batch], Batch]
    """What this rank computes of a batch, on its device."""
    device: torch.device
    reference: Switch | None = None
    """Makes the model the reference; None: none is needed."""
    old: Switch = nullcontext
    """Makes the model the policy that draws samples."""

    @contextmanager
    def encoders_there(self) -> Iterator[None]:
        """Inside, the encoders are on the device."""
        modules = [part for part in self.encoders.components.values() if isinstance(part, nn.Module)]
        for module in modules:
            module.to(self.device)
        try:
            yield
        finally:
            for module in modules:
                module.to("cpu")

    @torch.no_grad()
    def predict(self, switch: Switch, batch: Batch, noisy: torch.Tensor) -> torch.Tensor:
        """v of `switch`'s values, on the host."""
        there = self.own(batch | {"latents": noisy})
        with switch() as other:
            model = self.model if other is None else other
            return self.denoise(model, there["latents"], there["_time"], there).cpu()


class PromptFeatures:
    """Text features of prompts; those that were not asked for lately are encoded, each by itself.

    Args:
        generator: Whose encoders work.
    """

    def __init__(self, generator: FlowModel) -> None:
        self._generator, self._adapter = generator, generator.denoise.adapter
        self._is_guided = isinstance(generator.denoise, GuidedDenoiser)
        self._kept: OrderedDict[str, TextFeatures] = OrderedDict()

    def batch_of(self, rows: Sequence[PromptRow]) -> Batch:
        """Features of a micro-batch's prompts, padded to one length; with guidance those of the empty prompt, too."""
        text: Batch = dict(self._adapter.pad_text([self._kept[row.place] for row in rows]))
        if self._is_guided:
            text |= blank_text(self._adapter.pad_text([self._blank] * len(rows)))
        return text

    def remember(self, rows: Sequence[PromptRow]) -> None:
        """Have the features of these prompts at hand, and forget the longest unused ones of others."""
        by_place = {row.place: row for row in rows}
        missing = [row for place, row in by_place.items() if place not in self._kept]
        if missing:
            self._encode(missing)
        for place in by_place:
            self._kept.move_to_end(place)
        # Those of this batch stay, however many they are.
        while len(self._kept) > max(_PROMPTS_KEPT, len(by_place)):
            self._kept.popitem(last=False)

    def _encode(self, rows: Sequence[PromptRow]) -> None:
        unknown = []
        for row in rows:
            stored = row.stored_features()
            if stored is None:
                unknown.append(row)
            else:
                self._kept[row.place] = stored
        if unknown:
            with self._generator.encoders_there():
                for row in unknown:
                    self._kept[row.place] = self._encoded(row.text)

    @cached_property
    def _blank(self) -> TextFeatures:
        """Of the empty prompt, which guidance leads away from."""
        with self._generator.encoders_there():
            return self._encoded("")

    def _encoded(self, text: str) -> TextFeatures:
        (features,) = self._adapter.encode_text(self._generator.encoders, [text])
        return {name: value.cpu() for name, value in features.items()}
