"""The arrays of a sample along its tokens, in one form. A plugin's data set may give them as lists, numpy arrays or
tensors, and with the row axis that processors put in front of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm.core.batch import LATENT
from mindspeed_mm.core.errors import DataError

_WAY_OUT = (
    "Let the data set give a dict with `input_ids` and `labels`, each a list or an array of whole numbers of shape "
    "(tokens,), labels -100 where not trained; or give it a `collate_fn(samples) -> batch` of its own."
)


BESIDE = {
    "attention_mask": 1,
    "mm_token_type_ids": 0,
    "token_type_ids": 0,
    "position_ids": 0,
    "part_ids": 0,
    "token_kinds": 0,
}
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

    @property
    def is_drawn(self) -> np.ndarray:
        """(L,) bool, True at latents that a model is trained to denoise."""
        return drawn_latents(self.beside.get("part_ids"), self.beside.get("token_kinds"), self.ids)


def drawn_latents(part_ids: Any, token_kinds: Any, ids: Any) -> Any:
    """Where latents stand that a model is trained to denoise, bool in the shape of `ids`; arrays or tensors alike.

    Args:
        part_ids: As of a batch; None: nothing is drawn.
        token_kinds: As of a batch; None: nothing is drawn.
        ids: Of tokens.
    """
    if part_ids is None or token_kinds is None:
        return ids != ids  # all False, array or tensor
    # A negative part id marks what is to be drawn; see the batch keys in core.batch.
    return (part_ids < 0) & (token_kinds == LATENT)


def token_arrays(sample: object) -> TokenArrays:
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
        read = _whole_numbers
        if key == "loss_weights":
            read = _numbers
        found[key] = read(key, sample[key])
        if len(found[key]) != len(ids):
            raise DataError(_apart(found[key].shape, ids.shape), key=key, way_out=_WAY_OUT)
    beside = {key: found[key] for key in BESIDE if key in found}
    return TokenArrays(ids, found.get("labels"), found.get("loss_weights"), beside)


def trainable_arrays(sample: object) -> TokenArrays:
    """The same; raises `DataError` also where there are no labels."""
    arrays = token_arrays(sample)
    if arrays.labels is None:
        raise DataError("the sample has no labels", key="labels", way_out=_WAY_OUT)
    return arrays


def check_lengths(sample: object) -> None:
    """Raise `DataError` where an array of a sample that has a number for each token is not as long as its `input_ids`.

    For samples that a collator of their own joins: only the last axes of what has a shape are compared. Labels are left
    to `labels_apart`: such a collator may put a question and its answer together.
    """
    for part in _parts(sample):
        ids = _shape_of(part.get("input_ids"))
        for key in BESIDE:
            shape = _shape_of(part.get(key))
            if ids and shape and shape[-1] != ids[-1]:
                raise DataError(_apart(shape, ids), key=key, way_out=_OF_COLLATOR)


def labels_apart(sample: object) -> str:
    """How the labels of a sample differ in length from its `input_ids`; empty: they do not, or one has no shape."""
    for part in _parts(sample):
        ids, labels = _shape_of(part.get("input_ids")), _shape_of(part.get("labels"))
        if ids and labels and ids[-1] != labels[-1]:
            return f"labels of shape {labels} and input_ids of shape {ids}"
    return ""


def check_batch_lengths(batch: Mapping[str, object], names: Sequence[str]) -> None:
    """Raise `DataError` where a batch has an array along the tokens that is not as long as its token ids.

    Args:
        batch: As collated.
        names: Of its samples.
    """
    for ids_key, keys in _ALONG.items():
        ids = _shape_of(batch.get(ids_key))
        for key in keys:
            shape = _shape_of(batch.get(key))
            if ids and shape and shape[-1] != ids[-1]:
                raise DataError(_apart(shape, ids, ids_key), where=", ".join(names), key=key, way_out=_OF_COLLATOR)


_ALONG = {"input_ids": tuple(BESIDE), "decoder_input_ids": ("decoder_attention_mask",)}
"""Token ids of a batch → what has a number for each of them on its last axis."""
_OF_COLLATOR = "Let the data set and its collate_fn give one number for each token, padding included."


def _parts(sample: object) -> list[Mapping[str, Any]]:
    """A sample, or both answers of a preference pair, where they have keys."""
    if not isinstance(sample, Mapping):
        return []
    pair = [sample.get(side) for side in ("chosen", "rejected")]
    return [part for part in (sample, *pair) if isinstance(part, Mapping)]


def _shape_of(values: object) -> tuple[int, ...]:
    """The shape of an array, a tensor or lists; empty of anything else."""
    if not isinstance(values, list | tuple | np.ndarray) and not hasattr(values, "shape"):
        return ()
    try:
        return tuple(map(int, np.shape(values)))
    except (ValueError, TypeError):  # lists of different lengths
        return ()


def _apart(shape: tuple[int, ...], ids: tuple[int, ...], ids_key: str = "input_ids") -> str:
    return f"has shape {shape}, and {ids_key} has shape {ids}"


def _whole_numbers(key: str, values: object) -> np.ndarray:
    found = _numbers(key, values)
    if found.dtype.kind == "f" and len(found):
        raise DataError(f"are {found.dtype}, not whole numbers", key=key, way_out=_WAY_OUT)
    return found.astype(np.int64, copy=False)


def _numbers(key: str, values: object) -> np.ndarray:
    """Read (L,) numbers, without a row axis in front of them."""
    try:
        found = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # lists of different lengths, tensors with gradients
        raise DataError(f"are no array: {error}", key=key, way_out=_WAY_OUT) from error
    if found.ndim == 2 and len(found) == 1:
        found = found[0]
    if found.ndim != 1 or found.dtype.kind not in "iuf":
        told = f"{values!r:.60}"
        if found.ndim:
            told = f"an array of {found.dtype} of shape {found.shape}"
        raise DataError(f"are {told}, not numbers of shape (tokens,)", key=key, way_out=_WAY_OUT)
    return found
