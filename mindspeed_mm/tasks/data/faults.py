"""Why a row cannot be used: the kind of its fault, and what to change."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mindspeed_mm.core.errors import DataError, MMError, Problem
from mindspeed_mm.fsdp.data.data_utils.sample import TooLongError

TOO_LONG = "too long"
FAILED = "the data set failed"
_TELLING_CHARACTERS = 300

_KINDS: tuple[tuple[str, str], ...] = (
    (FAILED, rf"^{FAILED}"),
    ("false declarations", r"the row declares"),
    ("marked rows", r"takes the whole row out of training|marks the answer as a bad one"),
    ("fields", r"the row has no (medium|caption)|\bis null\b|neither a caption nor|number above 0"),
    ("fields", r"is not a (path|resolution|part of|tool call)|cannot be read as"),
    ("fields", r"no row format fits|several columns may hold|nothing answers it; the row|holds no list of messages"),
    (
        "fields",
        r"is not known, and it may say|trains parts of a turn|are asked of a (medium|video)|weights of the turn",
    ),
    ("fields", r"and no answer of its own|<ref-object> in the text|<bbox> in the text|write boxes is not known"),
    ("out of proportion", r"it would be enlarged"),
    ("roles", r"^unknown role|^a result of a tool|nothing answers it|no turn of the|end with a turn of the model"),
    ("nothing is trained", r"^no trainable token"),
    ("everything is trained", r"^every token would be trained"),
    ("chat template", r"^the chat template|^the rendered conversation|chat template does not write"),
    ("placeholders and media differ", r"placeholders? in the text|^the rendered text has .* tokens? for"),
    ("the model takes no such media", r"but the model takes"),
    ("preference pairs", r"^chosen and rejected|^nothing comes before the answers"),
    (
        "samples of the plugin",
        r"^the sample (is|has) (a|no) |^has shape \(.*input_ids has shape|^are .*numbers|^are no array",
    ),
    ("text files", r"JSON|UTF-8|surrogate|not an object|the row has \d+ bytes|header's .* cells"),
    ("fields", r"the field is missing|has the fields|is not a message|is not a number from|neither true nor false"),
    ("fields", r"is not (text|a list|a document|messages)|question, answer"),
    ("missing media", r"' not found|' holds no '|is not a regular file|cannot be opened"),
    ("media outside the roots", r"outside the media roots|is a URL"),
    ("media beyond the limits", r"too large|megapixels|processor refuses|more than \d+( s)?$|fewer than the"),
    ("media beyond the limits", r"pixels is refused|s long; the model takes"),
    (
        "broken media",
        r"is broken|is cut|is not an? |base64|not allowed|LFS|damaged|backwards|no media item",
    ),
    ("broken media", r"is empty \(0 bytes\)|empty list of frames"),
    ("broken media", r"has no (video stream|frames|frame rate|sound|samples|sample rate)|not numbers"),
)
"""Kind → what its messages hold; the first that matches counts."""


@dataclass(frozen=True, slots=True)
class RowFault:
    """Why a row cannot be used as it stands."""

    kind: str
    what: str
    key: str = ""
    way_out: str = ""
    tokens: int | None = None
    """Length before truncation of a row that is too long."""


def kind_of(what: str) -> str:
    """The kind of fault that a message tells of."""
    beginning = what[:_TELLING_CHARACTERS]  # behind it stands what users wrote
    for kind, pattern in _KINDS:
        if re.search(pattern, beginning):
            return kind
    return "other"


def fault_of_length(error: TooLongError) -> RowFault:
    """The fault of a row above `cutoff_len`, with its length."""
    problem = error.problems[0]
    return RowFault(TOO_LONG, problem.what, problem.key, problem.way_out, error.tokens)


def fault_of_reason(place: str, reason: str) -> RowFault:
    """The fault of a row that was left out with a reason when the data set was opened."""
    what = reason.removeprefix(place).strip()
    return RowFault(kind_of(what), what)


def fault_of(error: MMError) -> RowFault:
    """The fault of a row by the error that was raised for it."""
    problem = error.problems[0]
    if error.headline:  # several problems: all of them in one text
        problem = Problem(str(error))
    kind = "configuration"
    if isinstance(error, DataError):
        kind = kind_of(problem.what)
    return RowFault(kind, problem.what, problem.key, problem.way_out)
