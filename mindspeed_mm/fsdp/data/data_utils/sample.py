"""One training sample between the raw row and its token ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import numpy as np

from mindspeed_mm.core.errors import DataError


class Place(NamedTuple):
    """Where a row stands, printed as `train.jsonl:12`."""

    file: str
    row: int
    """Line of a JSONL file, otherwise the number of the row; both count from 1."""

    def __str__(self) -> str:
        return f"{self.file}:{self.row}"


@dataclass(slots=True)
class Sample:
    """A row, converted: the same shape for every row format."""

    place: Place
    messages: list[dict[str, Any]] = field(default_factory=list)
    """`{"role", "content"}` as chat templates take them; content is a string, or a list of typed parts where a turn
    holds media: `{"type": "text", "text"}`, `{"type": "image"}`."""
    trained: list[bool] = field(default_factory=list)
    """Per message, whether its tokens may be trained."""
    images: list[Any] = field(default_factory=list)
    """Paths, bytes or `{"path" | "bytes"}`, one for each image part, in order."""
    text: str | None = None
    """The document of a text-only row; `messages` is empty then."""


class TooLongError(DataError):
    """A sample has more tokens than `cutoff_len` and the policy does not shrink it."""


class EncodedSample(TypedDict):
    """A sample as token ids. L tokens. A data set of a plugin may give plain dicts with these keys."""

    sample_id: str
    input_ids: np.ndarray
    """(L,) int64."""
    labels: np.ndarray
    """(L,) int64, the token itself where trained, -100 elsewhere; not shifted."""
    images: list[Any]
    """The sample's images as its media plugin encoded them, in order."""
    shrunk: bool
    """Whether whole turns were left out to fit `cutoff_len`."""
