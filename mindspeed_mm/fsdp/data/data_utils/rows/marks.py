"""Marks in a turn that say whether it is trained, and how much it counts, in the spellings of all common tools.

`train`, `training` and `weight` are axolotl's, `loss` and `loss_scale` ms-swift's, `weight` OpenAI's, `loss_weight`
LLaMA-Factory v1's; the others are spellings of the same.
"""

from __future__ import annotations

import numpy as np

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.rows.row_fields import Row, short
from mindspeed_mm.fsdp.data.data_utils.sample import REPAIR, RowLocation

_TRAINED = ("train", "trainable", "trained", "training", "is_trainable", "learn", "loss", "compute_loss", "loss_mask")
"""True or 1: the turn is trained."""
_UNTRAINED = ("mask", "masked", "is_masked", "ignore", "ignore_loss", "no_loss", "skip_loss")
"""True or 1: the turn is not trained."""
_WEIGHTS = ("weight", "loss_weight", "loss_scale")
"""How much the tokens of the turn count."""
_DETAILS = ("train_detail", "training_detail", "reasoning_training_detail")
"""Lists of parts of a turn that are trained apart (axolotl)."""
MARKS = frozenset({*_TRAINED, *_UNTRAINED, *_WEIGHTS, *_DETAILS})
_LARGEST_WEIGHT = float(np.finfo(np.float32).max)
"""Batches hold weights in fp32."""


def weight_of(message: Row, where: str, key: str) -> float:
    """How much a turn counts: 1, or its weight; nothing where any mark takes it out.

    Raises:
        DataError: A mark is not of its kind, two weights differ, or parts of the turn are marked apart.
    """
    if MARKS.isdisjoint(message):
        return 1.0
    for name in _DETAILS:
        if message.get(name) not in (None, [], {}):
            raise DataError(
                f"'{name}' trains parts of a turn, which is not done",
                where=where,
                key=f"{key}.{name}",
                way_out="Mark whole turns with train: true or false.",
            )
    trains = [_flag(message, name, where, key) for name in _TRAINED]
    masks = [_flag(message, name, where, key) for name in _UNTRAINED]
    weight = _weight(message, where, key)
    return 0.0 if False in trains or True in masks else weight


_LABELS = ("label", "kto_tag")
"""KTO's: whether the answer is a good one (TRL, ms-swift; LLaMA-Factory)."""
_OF_ROWS = frozenset({*_TRAINED, *_UNTRAINED, *_LABELS})


def check_row_marks(row: Row, place: RowLocation, *, ranking: bool) -> None:
    """Raise `DataError` for a row that says of itself that it is not to be trained, or that its answer is a bad one.

    Args:
        row: The raw row.
        place: Where it stands.
        ranking: Whether rows are preference pairs.
    """
    if _OF_ROWS.isdisjoint(row):
        return
    says = [name for name in _TRAINED if row.get(name) is False] + [
        name for name in _UNTRAINED if row.get(name) is True
    ]
    if says:
        raise DataError(
            f"'{says[0]}' {short(row[says[0]])} takes the whole row out of training",
            where=str(place),
            key=says[0],
            way_out="Leave the row out of the file.",
        )
    bad = [] if ranking else [name for name in _LABELS if row.get(name) is False]
    if bad:
        raise DataError(
            f"'{bad[0]}' false marks the answer as a bad one (KTO), and it would be taught as a good one",
            where=str(place),
            key=bad[0],
            way_out="KTO is not supported: keep the rows with good answers, or make pairs and train with DPO.",
        )


def trains_asked(message: Row) -> str | None:
    """A mark that asks to train a turn; None where there is none."""
    if MARKS.isdisjoint(message):
        return None
    return next((name for name in _TRAINED if message.get(name) is not None and message[name] in (True, 1)), None)


def _flag(message: Row, name: str, where: str, key: str) -> bool | None:
    """A mark that is true or false, 1 or 0; None where the turn has none."""
    value = message.get(name)
    if value is None:
        return None
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    what = f"{name} {short(value)} is neither true nor false"
    raise DataError(what, where=where, key=f"{key}.{name}", way_out=REPAIR)


def _weight(message: Row, where: str, key: str) -> float:
    found: dict[str, float] = {}
    for name in _WEIGHTS:
        value = message.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 <= value <= _LARGEST_WEIGHT):
            what = f"{name} {short(value)} is not a number from 0 that fp32 has"
            raise DataError(what, where=where, key=f"{key}.{name}", way_out=REPAIR)
        found[name] = float(value)
    if len(set(found.values())) > 1:
        shown = ", ".join(f"{name} {value:g}" for name, value in found.items())
        raise DataError(f"the weights of the turn differ: {shown}", where=where, key=key, way_out="Keep one of them.")
    return next(iter(found.values()), 1.0)
