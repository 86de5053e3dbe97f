"""Encodes media and captions while training, where no features were extracted; and how long captions are for a family's
tokenizers, and which of them are cut.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, TextFeatures
from mindspeed_mm.fsdp.models.diffusion.components import load_component
from mindspeed_mm.fsdp.models.diffusion.media_roles import REJECTED, REJECTED_LATENTS, TARGET
from mindspeed_mm.fsdp.utils.processor import tokenizer_of
from mindspeed_mm.fsdp.utils.quiet import quiet

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


_SHOWN = 40
_CAPTIONS_KEPT = 256
"""Features of the captions seen last are kept: the empty one comes all the time."""


class LiveEncoder:
    """Raw batches → what `mm extract` would have stored of them.

    Samples are encoded one by one: what comes out does not depend on the batch that one is in.

    Args:
        adapter: The family.
        pipeline: From `components.load_encoders`; on its device.
    """

    def __init__(self, adapter: DiffusionAdapter, pipeline: DiffusionPipeline) -> None:
        self._adapter, self._pipeline = adapter, pipeline
        self._texts: OrderedDict[str, TextFeatures] = OrderedDict()
        self._lengths, self._has_warned = CaptionLengths(adapter, pipeline.components), False

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Batch:
        """`latents`, text features and conditions, on the host.

        Args:
            batch: `pixels` (B, 3, T, H, W) uint8, those of the task's roles, and `captions`.
        """
        encoded: dict[str, list[torch.Tensor]] = {}
        texts: list[TextFeatures] = []
        keys = {TARGET: "pixels", **{role.name: role.batch_key for role in self._adapter.media_roles}}
        if REJECTED.batch_key in batch:
            keys[REJECTED.name] = REJECTED.batch_key
        for row in range(len(batch["pixels"])):
            media = {name: batch[key][row : row + 1] for name, key in keys.items() if key in batch}
            found = {"latents": self._adapter.encode_media(self._pipeline, media[TARGET])}
            if REJECTED.name in media:
                # Popped: conditions are made of the target alone.
                found[REJECTED_LATENTS] = self._adapter.encode_media(self._pipeline, media.pop(REJECTED.name))
            found |= self._adapter.encode_conditions(self._pipeline, media)
            for key, tensor in found.items():
                encoded.setdefault(key, []).append(tensor.cpu())
            texts.append(self._text(batch["captions"][row], media))
        joined = {key: torch.cat(tensors) for key, tensors in encoded.items()}
        return joined | self._adapter.pad_text(texts)

    def _text(self, caption: str, media: Mapping[str, torch.Tensor]) -> TextFeatures:
        if self._adapter.task in self._adapter.text_reads_media:
            self._warn_of_length(caption)
            features = read_beside(self._adapter, self._pipeline, caption, media)
            return {key: value.cpu() for key, value in features.items()}
        if caption not in self._texts:
            self._warn_of_length(caption)
            (features,) = self._adapter.encode_text(self._pipeline, [caption])
            self._texts[caption] = {key: value.cpu() for key, value in features.items()}
        self._texts.move_to_end(caption)
        if len(self._texts) > _CAPTIONS_KEPT:
            self._texts.popitem(last=False)
        return self._texts[caption]

    def _warn_of_length(self, caption: str) -> None:
        """Once: `mm data check` counts all."""
        if self._has_warned:
            return
        (length,) = self._lengths([caption])
        if length.is_cut:
            self._has_warned = True
            warnings.warn(
                f"the text encoder reads {length.limit} tokens, and '{caption[:_SHOWN]}…' has {length.tokens}: the end "
                "of such captions is cut off. mm data check counts them",
                stacklevel=2,
            )


def read_beside(
    adapter: DiffusionAdapter,
    pipeline: DiffusionPipeline,
    caption: str,
    media: Mapping[str, torch.Tensor],
    place: str = "",
) -> TextFeatures:
    """Features of a caption that the text encoder reads together with media.

    Args:
        adapter: The family.
        pipeline: From `components.load_encoders`.
        caption: Of the sample.
        media: Of the sample, by their roles.
        place: Of the row, where it is known.

    Raises:
        DataError: It cannot be read, for it holds a mark of media that is not there.
    """
    try:
        (features,) = adapter.encode_text_beside(pipeline, [caption], media)
    except (StopIteration, ValueError, IndexError) as error:  # of what looks for the medium, or counts its tokens
        what = f"the caption '{caption:.80}' cannot be read beside its media: {type(error).__name__} {error}".rstrip()
        way_out = "Take marks of media out of it, or drop the row."
        raise DataError(what, where=place, key="prompt", way_out=way_out) from error
    return features


class CaptionLength(NamedTuple):
    """Of one caption, for the tokenizer that cuts most of it."""

    tokens: int
    """Special ones included."""
    limit: int
    """Number of tokens that are read; those behind it are not."""

    @property
    def is_cut(self) -> bool:
        """Whether the end of the caption is not read."""
        return self.tokens > self.limit


class CaptionLengths:
    """Measures captions.

    Args:
        adapter: The family, with its folder.
        tokenizers: Name of the component → tokenizer, as a pipeline has them; None: loaded from the folder.

    Raises:
        ModelFolderError: A tokenizer cannot be loaded.
    """

    def __init__(self, adapter: DiffusionAdapter, tokenizers: JsonMapping | None = None) -> None:
        self._tokenizers = []
        for name, limit in adapter.caption_limits().items():
            if tokenizers is None:
                tokenizer = load_component(adapter, name)
            else:
                tokenizer = tokenizers[name]
            self._tokenizers.append((tokenizer, limit))

    def __call__(self, captions: Sequence[str]) -> list[CaptionLength]:
        """The length of each caption; 0 of 0 where the family has no tokenizer."""
        longest = [CaptionLength(0, 0)] * len(captions)
        if not captions:
            return longest
        for position, (tokenizer, limit) in enumerate(self._tokenizers):
            with quiet("transformers"):
                # A processor would ask for the picture that a mark in a caption names.
                rows = tokenizer_of(tokenizer)(list(captions)).input_ids
            for number, ids in enumerate(rows):
                length, before = CaptionLength(len(ids), limit), longest[number]
                if position == 0 or length.tokens - limit > before.tokens - before.limit:
                    longest[number] = length
        return longest

    def cut(self, captions: Sequence[str]) -> list[int]:
        """Indices of the captions whose end is not read."""
        return [number for number, length in enumerate(self(captions)) if length.is_cut]
