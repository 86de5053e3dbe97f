"""Text features without their padding, and with it again: only a caption's own tokens are stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch

TEXT, MASK = "prompt_embeds", "prompt_mask"


def own_rows(embeds_BLD: torch.Tensor, mask_BL: torch.Tensor) -> list[torch.Tensor]:
    """The rows (tokens, D) of each caption that its mask names."""
    return [embeds[mask.bool()].clone() for embeds, mask in zip(embeds_BLD, mask_BL, strict=True)]


def pad_rows(
    features: Sequence[dict[str, torch.Tensor]], text: str = TEXT, mask: str = MASK, multiple: int = 8
) -> dict[str, torch.Tensor]:
    """Rows of several captions as one batch with its mask: zeros behind each caption, up to the longest of them.

    Args:
        features: With (tokens, D) under `text` each.
        text: Batch key of the rows.
        mask: Batch key of the mask, (B, L) int64.
        multiple: The length is rounded up to it, so that compiled models meet few lengths.
    """
    rows = [each[text] for each in features]
    longest = max(1, *(len(row) for row in rows))
    length = -(-longest // multiple) * multiple
    padded = rows[0].new_zeros(len(rows), length, rows[0].shape[-1])
    real = torch.zeros(len(rows), length, dtype=torch.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
        real[index, : len(row)] = 1
    return {text: padded, mask: real}
