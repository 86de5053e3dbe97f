"""Text features: how a pipeline is asked for them, without their padding, and with it again. Only a caption's own
tokens are stored where the transformer does not attend to the padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

EMBEDS, MASK, POOLED = "prompt_embeds", "prompt_mask", "pooled_prompt_embeds"
UNGUIDED = {"do_classifier_free_guidance": False}
"""Argument of `encode_prompt` without which some pipelines also encode the negative prompt."""


def text_of_each(texts: str | Sequence[str], count: int | None = None) -> list[str]:
    """A text for each prompt, where one may be given for all of them.

    Args:
        texts: One text, or a list of them.
        count: Number of prompts; None: the texts are the prompts.

    Raises:
        ValueError: A list is of another length.
    """
    if isinstance(texts, str):
        return [texts] * (count or 1)
    if count not in (None, len(texts)):
        raise ValueError(f"{len(texts)} texts for {count} prompts: give one text for all, or a list with one for each")
    return list(texts)


@dataclass(frozen=True)
class CaptionRows:
    """What a pipeline's `encode_prompt` is called with, and what it returns."""

    returned: tuple[str, ...] = (EMBEDS,)
    """Batch keys of what it returns, in this order: "" for what is not used; what follows may be left out."""
    masks: Mapping[str, str] = field(default_factory=dict)
    """Batch key of rows that are stored without padding → batch key of their mask. Others keep their padding, since the
    transformer attends to it."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments beside the captions and their length."""

    def split(self, found: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        """Features of each caption.

        Args:
            found: What `encode_prompt` returned for all: (B, L, D), (B, D), and masks (B, L), None where all rows are
                the captions' own.
        """
        given = dict(zip(self.returned, found, strict=False))
        columns: dict[str, list[torch.Tensor]] = {}
        for key, value in given.items():
            if key not in ("", *self.masks.values()):
                columns[key] = own_rows(value, given.get(self.masks.get(key, "")))
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def joined(self, features: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Several captions' features as batch entries, (B, …): padded with a mask, or stacked where all are equally
        long."""
        batch: dict[str, torch.Tensor] = {}
        for key in features[0]:
            if key in self.masks:
                batch |= pad_rows(features, key, self.masks[key])
            else:
                batch[key] = torch.stack([each[key] for each in features])
        return batch


MASKED = {EMBEDS: MASK}
"""`CaptionRows.masks` of most families that store captions without padding."""


def own_rows(embeds_BLD: Sequence[torch.Tensor], mask_BL: torch.Tensor | None) -> list[torch.Tensor]:
    """The rows (tokens, D) of each caption that its mask names; without a mask all of them."""
    if mask_BL is None:
        # Cloned: a view would keep the padded batch of all captions in memory.
        return [embeds.clone() for embeds in embeds_BLD]
    return [embeds[mask.bool()].clone() for embeds, mask in zip(embeds_BLD, mask_BL, strict=True)]


def pad_rows(
    features: Sequence[dict[str, torch.Tensor]], text: str = EMBEDS, mask: str = MASK, multiple: int = 8
) -> dict[str, torch.Tensor]:
    """Rows of several captions as one batch with its mask: zeros behind each caption, up to the longest of them.

    Args:
        features: With (tokens, D) under `text` each.
        text: Batch key of the rows.
        mask: Batch key of the mask, (B, L) int64.
        multiple: The length is rounded up to it, so that compiled models meet few lengths.
    """
    rows = [each[text] for each in features]
    longest = max(1, *(len(row) for row in rows))  # not 0 rows, even if all captions are empty
    length = -(-longest // multiple) * multiple
    padded = rows[0].new_zeros(len(rows), length, rows[0].shape[-1])
    real = torch.zeros(len(rows), length, dtype=torch.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
        real[index, : len(row)] = 1
    return {text: padded, mask: real}
