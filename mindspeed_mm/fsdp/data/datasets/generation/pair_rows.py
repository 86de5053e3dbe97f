"""Rows of two pictures or clips of one caption, of which one was preferred."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.models.diffusion.media_roles import REJECTED, MediaRole
from mindspeed_mm.fsdp.params.data_args import BasicParameters

_CHOSEN = "chosen"
_PICKED = ("jpg_0", "jpg_1", "label_0")
"""Columns of Pick-a-Pic: both pictures, and 1 where the first was picked, 0 where the second was, 0.5 for a tie."""
_SCORES = ("score", "score_rejected")


def roles_of_rows(roles: Sequence[MediaRole], basic: BasicParameters) -> tuple[MediaRole, ...]:
    """The roles of a task, and the rejected side where rows are preference pairs (`stage: rm`)."""
    if basic.stage == "rm":
        return (*roles, REJECTED)
    return tuple(roles)


def as_pair(row: Mapping[str, object], place: object) -> JsonObject:
    """A row of a pair with the chosen side in `file` and the rejected one in `file_rejected`, whatever it is written
    as.

    Raises:
        DataError: Neither side was preferred.
    """
    found = dict(row)
    if _CHOSEN in found:
        found["file"] = found.pop(_CHOSEN)
    if all(name in found for name in _PICKED):
        sides = [found.pop(name) for name in _PICKED[:2]]
        label = found.pop("label_0")
        found.pop("label_1", None)
        if label not in (0, 1):
            raise DataError(
                f"{label} prefers neither side",
                where=str(place),
                key="label_0",
                way_out="Take ties out, or set on_bad_sample: skip and raise max_bad_fraction.",
            )
        found["file"], found["file_rejected"] = sides if label == 1 else reversed(sides)
    return found


def take_scores(row: JsonObject, place: object) -> tuple[float, ...]:
    """Scores of the chosen and the rejected side, whose columns are taken out of the row; none where it has none.

    Raises:
        DataError: One of them is missing, or is no number.
    """
    given = [row.pop(name, None) for name in _SCORES]
    if given == [None, None]:
        return ()
    try:
        scores = tuple(map(float, given))
    except (TypeError, ValueError):
        scores = (math.nan,)
    if not all(map(math.isfinite, scores)):
        raise DataError(
            f"{given[0]} and {given[1]} are not two numbers",
            where=str(place),
            key=_SCORES[1] if given[1] is None else _SCORES[0],
            way_out="Give both sides a score, or neither.",
        )
    return scores
