"""The arrays of a sample along its tokens, in one form. A plugin's data set may give them as lists, numpy arrays or
tensors, and with the row axis that processors put in front of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm.core.errors import DataError

_WAY_OUT = (
    "Let the data set give a dict with `input_ids` and `labels`, each a list or an array of whole numbers of shape "
    "(tokens,), labels -100 where not trained; or give it a `collate_fn(samples) -> batch` of its own."
)


BESIDE = {"attention_mask": 1, "mm_token_type_ids": 0, "token_type_ids": 0, "position_ids": 0}
"""Further arrays along the tokens that a sample may have, as processors return them → their value where it has none."""


class TokenArrays(NamedTuple):
    """What a sample has along its L tokens."""

    ids: np.ndarray
    """(L,) int64."""
    labels: np.ndarray | None
    """(L,) int64, -100 where not trained."""
    weights: np.ndarray | None
    """(L,), how much the loss of each token counts; None: all alike."""
    beside: dict[str, np.ndarray]
    """Those of `BESIDE` that it has, (L,) int64."""


def token_arrays(sample: Any) -> TokenArrays:
    """Read the arrays of a sample.

    Args:
        sample: A dict with `input_ids`, and perhaps `labels`, `loss_weights` and the keys of `BESIDE`, each of shape
            (L,) or (1, L).

    Raises:
        DataError: There are no ids, an array has another shape or other values, or their lengths differ.
    """
    if not isinstance(sample, Mapping):
        raise DataError(f"the sample is a {type(sample).__name__}, not a dict", key="input_ids", way_out=_WAY_OUT)
    if sample.get("input_ids") is None:
        keys = ", ".join(map(str, sample)) or "none"
        raise DataError(f"the sample has no input_ids; its keys: {keys}", key="input_ids", way_out=_WAY_OUT)
    ids = _whole_numbers("input_ids", sample["input_ids"])
    found = {"input_ids": ids}
    for key in ("labels", "loss_weights", *BESIDE):
        if sample.get(key) is None:
            continue
        found[key] = _numbers(key, sample[key]) if key == "loss_weights" else _whole_numbers(key, sample[key])
        if len(found[key]) != len(ids):
            raise DataError(f"has {len(found[key])} values for {len(ids)} input_ids", key=key, way_out=_WAY_OUT)
    beside = {key: found[key] for key in BESIDE if key in found}
    return TokenArrays(ids, found.get("labels"), found.get("loss_weights"), beside)


def trainable_arrays(sample: Any) -> TokenArrays:
    """The same; raises `DataError` also where there are no labels."""
    arrays = token_arrays(sample)
    if arrays.labels is None:
        raise DataError("the sample has no labels", key="labels", way_out=_WAY_OUT)
    return arrays


def _whole_numbers(key: str, values: Any) -> np.ndarray:
    found = _numbers(key, values)
    if found.dtype.kind == "f" and len(found):
        raise DataError(f"are {found.dtype}, not whole numbers", key=key, way_out=_WAY_OUT)
    return found.astype(np.int64, copy=False)


def _numbers(key: str, values: Any) -> np.ndarray:
    """Read (L,) numbers, without a row axis in front of them."""
    try:
        found = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # lists of different lengths, tensors with gradients
        raise DataError(f"are no array: {error}", key=key, way_out=_WAY_OUT) from error
    if found.ndim == 2 and len(found) == 1:
        found = found[0]
    if found.ndim != 1 or found.dtype.kind not in "iuf":
        told = f"an array of {found.dtype} of shape {found.shape}" if found.ndim else f"{values!r:.60}"
        raise DataError(f"are {told}, not numbers of shape (tokens,)", key=key, way_out=_WAY_OUT)
    return found
