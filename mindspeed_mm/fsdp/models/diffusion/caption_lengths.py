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
        limits = adapter.caption_limits()
        self._tokenizers = [
            (load_component(adapter, name) if tokenizers is None else tokenizers[name], limit)
            for name, limit in limits.items()
        ]

    def __call__(self, captions: Sequence[str]) -> list[CaptionLength]:
        """The length of each caption; 0 of 0 where the family has no tokenizer."""
        found: list[list[CaptionLength]] = [[] for _ in captions]
        with quiet("transformers"):
            for tokenizer, limit in self._tokenizers if captions else ():
                for lengths, ids in zip(found, tokenizer(list(captions)).input_ids, strict=True):
                    lengths.append(CaptionLength(len(ids), limit))
        nothing = CaptionLength(0, 0)
        return [max(lengths, key=lambda one: one.tokens - one.limit, default=nothing) for lengths in found]

    def cut(self, captions: Sequence[str]) -> list[int]:
        """Indices of the captions whose end is not read."""
        return [number for number, length in enumerate(self(captions)) if length.is_cut]
