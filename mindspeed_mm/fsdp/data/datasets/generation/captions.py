"""Captions of a row: which of several is trained on."""

from __future__ import annotations

from mindspeed_mm.core.seeds import derive_seed


def drawn_caption(seed: int, epoch: int, sample_id: str, captions: int) -> int:
    """Number of the caption that a sample has in an epoch: a function of these alone, the same for features and raw
    media, for every batch size, number of ranks and resume.

    Args:
        seed: `training.seed`.
        epoch: From 0.
        sample_id: See `rows.content_key`.
        captions: How many there are.
    """
    return derive_seed(seed, epoch, sample_id, "caption") % captions
