"""Codes of speech in rows and batches: frames of a number from each codebook of a codec, as talkers tell them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mindspeed_mm.core.batch import NO_CODE, Batch
from mindspeed_mm.core.errors import DataError

COLUMN = "audio_codes"


def codes_of(row: Mapping[str, Any], place: str, sizes: Sequence[int], extracted_by: str) -> np.ndarray:
    """The frames of a row's speech, (frames, codebooks) int64.

    Args:
        row: As it stands in its file; `audio_codes` is a list of frames.
        place: Of the row, for messages.
        sizes: How many codes each codebook has.
        extracted_by: What makes codes for this model, for messages.

    Raises:
        DataError: There are none, or none that the model knows.
    """
    given = row.get(COLUMN)
    if given is None or not len(given):
        raise DataError(
            "there are no codes, and no codec here makes them of a sound",
            where=place,
            key=COLUMN,
            way_out=f"Extract them with {extracted_by}.",
        )
    try:
        codes = np.stack([np.asarray(frame) for frame in given])
    except (TypeError, ValueError):
        codes = np.zeros(0)
    if codes.ndim != 2 or codes.shape[1] != len(sizes) or not np.issubdtype(codes.dtype, np.integer):
        raise DataError(
            f"{COLUMN} are no frames of {len(sizes)} numbers each",
            where=place,
            key=COLUMN,
            way_out="Extract them with the codec of this model.",
        )
    if (codes < 0).any() or (codes >= np.array(sizes)).any():
        raise DataError(
            f"codes go from {codes.min()} to {codes.max()}, those of the codec from 0 to {min(sizes) - 1}",
            where=place,
            key=COLUMN,
            way_out="Extract them with the codec of this model.",
        )
    return codes.astype(np.int64)


def in_rows(batch: Batch) -> dict[str, torch.Tensor]:
    """`codec_ids` of a batch as (B, L, G), padded with none, and `frame_places`.

    Args:
        batch: Padded; its `codec_ids` are (T, G), of all samples one behind the other.
    """
    flat = batch["codec_ids"]
    rows = flat.new_full((*batch["input_ids"].shape, flat.shape[-1]), NO_CODE)
    rows[batch["attention_mask"].bool()] = flat
    frames = rows[..., 1].flatten() != NO_CODE
    return {"codec_ids": rows, "frame_places": frames.nonzero().squeeze(1)}
