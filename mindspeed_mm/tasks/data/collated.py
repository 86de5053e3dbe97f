"""What a row has along its tokens where the data set's own collator makes them: read from a batch of that row alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mindspeed_mm.core.batch import IGNORED_LABEL, Batch
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator
from mindspeed_mm.fsdp.data.data_utils.token_arrays import TokenArrays, token_arrays
from mindspeed_mm.fsdp.data.dataloader.fetch import completed

_MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
"""Batch key of token ids → that of the mask beside them."""


class RowTokens(NamedTuple):
    """The arrays of a row's conversations, and why some cannot be shown."""

    arrays: list[tuple[str, TokenArrays]]
    """Each with its name: `chosen` and `rejected` of a pair, the number of several rows, empty of one."""
    trouble: str = ""
    """Why a sample has no arrays that can be read; empty: it has."""
    is_collated: bool = False
    """Whether they were read from a batch."""


def tokens_of(item: object, collate: Collator | None, name: str) -> RowTokens:
    """What a sample has along its tokens, or else a batch of it alone.

    Args:
        item: A sample, or a pair of them.
        collate: The data set's own collator; None: it has none.
        name: Where the sample comes from, for messages.
    """
    parts = as_pair(item)
    names = ("chosen", "rejected") if len(parts) > 1 else ("",)
    found, trouble = [], ""
    for part_name, part in zip(names, parts, strict=False):
        arrays = readable_arrays(part)
        if isinstance(arrays, TokenArrays):
            found.append((part_name, arrays))
        else:
            trouble = arrays
    is_whole = not trouble and all(arrays.labels is not None for _, arrays in found)
    if is_whole or collate is None:
        return RowTokens(found, trouble)
    try:
        return RowTokens(_arrays_of_batch(_batch_of(collate, item, name)), is_collated=True)
    except DataError as error:
        return RowTokens(found, error.problems[0].what)


def _batch_of(collate: Collator, item: object, name: str) -> Batch:
    """The batch of one sample. Raises `DataError` where the collator fails on it."""
    try:
        return completed(collate([item]), [name])
    except DataError:
        raise
    except Exception as error:  # a plugin's collator is foreign code
        what = f"the data set's collator fails on a batch of this row alone: {type(error).__name__}: {error}"
        raise DataError(what, where=name) from error


def _arrays_of_batch(batch: Batch) -> list[tuple[str, TokenArrays]]:
    """The rows of a batch without their padding, and what they are called.

    Labels and weights stand at the tokens that they are of, as in samples: `shift_labels`, which the loss reads, have
    them one place before. No row has a label at its first token. Raises `DataError` where there are no rows of ids.
    """
    key = next((key for key in _MASKS if isinstance(batch.get(key), torch.Tensor)), "")
    if not key or batch[key].dim() != 2:
        raise DataError(
            f"the data set's collator gives no rows of token ids; the keys of its batch: {', '.join(batch)}"
        )
    ids_BL = batch[key]
    mask_BL = _like(ids_BL, batch, _MASKS[key])
    labels_BL = _moved_back(_like(ids_BL, batch, "shift_labels"), IGNORED_LABEL)
    weights_BL = _moved_back(_like(ids_BL, batch, "loss_weights"), 0)
    found = []
    for row, name in enumerate(_names(batch, len(ids_BL))):
        kept = slice(None) if mask_BL is None else mask_BL[row] != 0
        labels = None if labels_BL is None else labels_BL[row][kept].numpy()
        weights = None if weights_BL is None else weights_BL[row][kept].numpy()
        found.append((name, TokenArrays(ids_BL[row][kept].numpy(), labels, weights, {})))
    return found


def _names(batch: Batch, rows: int) -> list[str]:
    if rows == 1:
        return [""]
    if rows == 2 and "pairs" in batch:
        return ["chosen", "rejected"]
    return [f"row {number} of {rows}" for number in range(1, rows + 1)]


def _like(ids_BL: torch.Tensor, batch: Batch, key: str) -> torch.Tensor | None:
    """What a batch has for each of its tokens under a key; None where it has no such thing."""
    found = batch.get(key)
    if isinstance(found, torch.Tensor) and found.shape == ids_BL.shape:
        return found
    return None


def _moved_back(of_next_BL: torch.Tensor | None, first: float) -> torch.Tensor | None:
    """(B, L) of each token what the token before it has for the next one."""
    if of_next_BL is None:
        return None
    return torch.cat([torch.full_like(of_next_BL[:, :1], first), of_next_BL[:, :-1]], dim=1)


def as_pair(sample: object) -> list[Any]:
    """The better and the worse answer of a preference row; any other sample alone."""
    if isinstance(sample, dict) and {"chosen", "rejected"} <= sample.keys():
        return [sample["chosen"], sample["rejected"]]
    if type(sample) is tuple:
        return list(sample)
    return [sample]


def readable_arrays(sample: object) -> TokenArrays | str:
    """The arrays of a sample along its tokens; or why there are none that can be read. A plugin's own collator may take
    such a sample."""
    try:
        return token_arrays(sample)
    except DataError as error:
        return " ".join(part for part in (error.problems[0].key, error.problems[0].what) if part)
