"""What a plain collator leaves out of a batch: its samples' names, and labels shifted to what predicts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mindspeed_mm.core.batch import IGNORED_LABEL, TRAINED_KEYS, Batch
from mindspeed_mm.core.errors import DataError

_KEY = "data.dataset_param.dataset_type"


def completed(batch: Any, names: Sequence[str]) -> Batch:
    """The batch as training takes it.

    Args:
        batch: As collated; a mapping.
        names: Of its samples, in order.

    Returns:
        The same with `sample_ids`, and with `shift_labels` made of `labels`, where it had none.

    Raises:
        DataError: It is not a mapping, holds nothing that a loss can be computed from, or holds labels that are not a
            tensor of rows.
    """
    if not isinstance(batch, Mapping):
        raise DataError(
            f"the collator gave a {type(batch).__name__}, a batch is a dict of tensors",
            key=_KEY,
            way_out="Let `collate_fn(samples)` give a dict with the arguments of the model's forward, and `labels`.",
        )
    found: Batch = dict(batch)
    found.setdefault("sample_ids", list(names))
    # Labels are for a language model, whatever else a plugin calls its inputs.
    if "shift_labels" not in found and ("labels" in found or not TRAINED_KEYS & found.keys()):
        found["shift_labels"] = shift_by_document(_labels_of(found), found)
    return found


def shift_by_document(labels_BL: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(B, L): what the token behind each one has; -100 on the last of a document.

    Documents of one row end where `cu_seq_lens_q` says; without it, where a row of `position_ids` begins anew.
    """
    shifted_BL = torch.full_like(labels_BL, IGNORED_LABEL)
    shifted_BL[:, :-1] = labels_BL[:, 1:]
    borders, positions = batch.get("cu_seq_lens_q"), batch.get("position_ids")
    if isinstance(borders, torch.Tensor):
        ends = borders[(borders > 0) & (borders <= labels_BL.shape[1])].long() - 1
        shifted_BL[:, ends] = IGNORED_LABEL
    elif isinstance(positions, torch.Tensor) and positions.shape == labels_BL.shape:
        shifted_BL[:, :-1].masked_fill_(positions[:, 1:] == 0, IGNORED_LABEL)
    return shifted_BL


def _labels_of(batch: Batch) -> torch.Tensor:
    labels = batch.get("labels")
    if isinstance(labels, torch.Tensor) and labels.dim() == 2 and not labels.is_floating_point():
        return labels
    told = ", ".join(map(repr, batch.keys() - {"sample_ids"}))
    what = (
        f"the batch has neither labels nor shift_labels; its keys are {told}"
        if labels is None
        else f"labels are {_described(labels)}, not whole numbers of shape (rows, tokens)"
    )
    raise DataError(
        what,
        key=_KEY,
        way_out="Let `collate_fn` give `labels`, (B, L) token ids with -100 where not trained, or `shift_labels`.",
    )


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    return f"a {type(value).__name__}"
