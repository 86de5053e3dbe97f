"""Preference pairs of two whole texts: what both begin with is the prompt.

In transcripts speakers are marked, as in Anthropic's hh-rlhf: `\\n\\nHuman: … \\n\\nAssistant: …`, and each marked
stretch is a turn; ms-swift (`HHRLHFPreprocessor`) splits them at the same marks. Texts without marks are split where
they begin to differ, as TRL does (`extract_prompt`), but never within a word.
"""

from __future__ import annotations

import re
import unicodedata

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.rows.row_fields import Row, unread_fields
from mindspeed_mm.fsdp.data.data_utils.sample import REPAIR, RowLocation

_MARK = re.compile(r"(?:\A\s*|\n\n)(Human|Hum|Assistant):")
"""`Hum:` is a slip of some rows of hh-rlhf."""
_ROLES = {"Human": "user", "Hum": "user", "Assistant": "assistant"}
SPLIT_NOTE = "a pair of texts has no prompt of its own: what both begin with is taken as the user's turn"
"""Note of a sample."""


def turns_of_transcript(text: str) -> list[JsonObject] | None:
    """The turns of a transcript; None: the text does not begin with a speaker's mark."""
    before, *rest = _MARK.split(text)
    if not rest or before.strip():
        return None
    # The expression has one group: speaker and words take turns.
    speakers, contents = rest[::2], rest[1::2]
    return [
        {"role": _ROLES[speaker], "content": content.strip()}
        for speaker, content in zip(speakers, contents, strict=True)
    ]


def split_pair(chosen: str, rejected: str) -> tuple[str, str, str]:
    """What two texts begin with, and how each goes on, without blanks around them."""
    differ = (place for place, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other)
    end = next(differ, min(len(chosen), len(rejected)))
    # Back to the beginning of the word: half a word has other tokens than the whole one.
    if _is_in_word(chosen, end) or _is_in_word(rejected, end):
        while end and _is_of_word(chosen[end - 1]):
            end -= 1
    return chosen[:end].strip(), chosen[end:].strip(), rejected[end:].strip()


def _is_in_word(text: str, end: int) -> bool:
    return 0 < end < len(text) and _is_of_word(text[end - 1]) and _is_of_word(text[end])


def _is_of_word(character: str) -> bool:
    """Whether it belongs to a word that is longer than itself: Chinese and Japanese write words without blanks."""
    return character.isalnum() and unicodedata.east_asian_width(character) not in ("W", "F")


def turns_of_texts(
    row: Row, columns: tuple[str, str], read: frozenset[str], place: RowLocation
) -> tuple[list[JsonObject], list[JsonObject], str]:
    """The conversations of a row whose two answers are whole texts, and a note on how they were read.

    Args:
        row: The raw row.
        columns: Of the better and of the worse text.
        read: Columns that are read besides.
        place: Where the row stands.

    Raises:
        DataError: The texts are the same, have nothing in common, or one is the beginning of the other; or the row has
            columns that nothing reads and that may be the prompt.
    """
    chosen, rejected = (str(row[column]) for column in columns)
    better, worse = turns_of_transcript(chosen), turns_of_transcript(rejected)
    if better is not None and worse is not None:
        return better, worse, ""

    def refused(what: str, way_out: str = REPAIR) -> DataError:
        return DataError(what, where=str(place), key=columns[1], way_out=way_out)

    if (better is None) != (worse is None):
        raise refused("chosen and rejected are a transcript with marked speakers and a text without")
    if chosen.strip() == rejected.strip():
        raise refused("chosen and rejected are the same")
    others = [name for name in unread_fields(row, {*columns, *read}) if isinstance(row[name], str | list)]
    prompt, end, other_end = split_pair(chosen, rejected)
    if others or not prompt:
        what = "chosen and rejected begin differently"
        if others:
            what = "nothing comes before the answers"
        raise refused(
            f"{what}; the row has {sorted(row)}",
            "Name the column of the prompt in data.dataset_param.attr.prompt, or of the messages in attr.messages.",
        )
    if not end or not other_end:
        raise refused("chosen and rejected must both go on after what they have in common, and one ends there")
    asked: JsonObject = {"role": "user", "content": prompt}
    answers = ({"role": "assistant", "content": text} for text in (end, other_end))
    first, second = ([asked, answer] for answer in answers)
    return first, second, SPLIT_NOTE
