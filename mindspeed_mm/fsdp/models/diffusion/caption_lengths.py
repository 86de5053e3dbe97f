"""How long captions are for a family's tokenizers, and which of them are cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import load_component
from mindspeed_mm.fsdp.utils.quiet import quiet


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

    def __init__(self, adapter: DiffusionAdapter, tokenizers: Mapping[str, Any] | None = None) -> None:
        self._tokenizers = []
        for name, limit in adapter.caption_limits().items():
            tokenizer = load_component(adapter, name) if tokenizers is None else tokenizers[name]
            self._tokenizers.append((tokenizer, limit))

    def __call__(self, captions: Sequence[str]) -> list[CaptionLength]:
        """The length of each caption; 0 of 0 where the family has no tokenizer."""
        longest = [CaptionLength(0, 0)] * len(captions)
        if not captions:
            return longest
        for position, (tokenizer, limit) in enumerate(self._tokenizers):
            with quiet("transformers"):
                rows = tokenizer(text=list(captions)).input_ids  # a processor takes pictures first
            for number, ids in enumerate(rows):
                length, before = CaptionLength(len(ids), limit), longest[number]
                if position == 0 or length.tokens - limit > before.tokens - before.limit:
                    longest[number] = length
        return longest

    def cut(self, captions: Sequence[str]) -> list[int]:
        """Indices of the captions whose end is not read."""
        return [number for number, length in enumerate(self(captions)) if length.is_cut]
