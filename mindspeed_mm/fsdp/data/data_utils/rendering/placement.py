"""Media in a rendered conversation: which placeholder is whose, and what takes its place.

Items whose tokens are a run of special tokens are put in after tokenisation, so that nothing can be cut or shifted in
between; the others (times of frames, line breaks) are written into the text before, for their tokens depend on their
neighbours.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import ItemSize, MediaFeatures, Placeholder
from mindspeed_mm.fsdp.data.data_utils.plugins.written_texts import WriteItems, WrittenItem
from mindspeed_mm.fsdp.data.data_utils.rendering.spans import Span
from mindspeed_mm.fsdp.data.data_utils.rendering.tokens import (
    PROTECTED,
    Encoding,
    token_span,
    with_stand_ins,
    without_marks,
)


class Expansion(NamedTuple):
    """What takes a placeholder's place."""

    kind: str
    token_ids: np.ndarray
    text: str | None
    """Written into the text instead, where it is given."""


class Placed(NamedTuple):
    """A text with its media."""

    text: str
    items: list[tuple[Span, Expansion]]
    """Where each item stands in the text, in order of place."""
    shifts: list[tuple[int, int]]
    """(position in the text before, by how much what follows moved), rising."""

    def moved(self, span: Span) -> Span:
        """Where characters of the text before stand now."""
        return self._moved(span[0]), self._moved(span[1])

    def _moved(self, position: int) -> int:
        found = bisect.bisect_right(self.shifts, (position, 1 << 62))  # those at or before the position
        if not found:
            return position
        _, shift = self.shifts[found - 1]
        return position + shift


class MediaPlaces:
    """Finds and fills the placeholders of one model.

    Args:
        placeholders: Kind of media → what the chat template writes for an item.
        write_items: Says what stands for the pictures of a text, where their own features do not.
    """

    def __init__(self, placeholders: Mapping[str, Placeholder], write_items: WriteItems | None = None) -> None:
        self._placeholders, self._write_items = dict(placeholders), write_items
        texts = sorted(placeholders.items(), key=lambda entry: -len(entry[1].text))
        either = "|".join(f"(?P<{kind}>{re.escape(placeholder.text)})" for kind, placeholder in texts)
        self._pattern = re.compile(f"(?<!{PROTECTED})(?:{either})") if either else None

    def expansion_of(self, item: MediaFeatures) -> Expansion:
        """Return what takes the place of an encoded item's placeholder."""
        return Expansion(item.kind, item.token_ids, item.text)

    def expansion_for(self, kind: str, size: ItemSize) -> Expansion:
        """Return the same for an item whose size alone is known: its placeholder's id stands for each of its tokens."""
        placeholder = self._placeholders.get(kind)
        fill = placeholder.token_id if placeholder is not None else 0
        return Expansion(kind, np.full(size.tokens, fill, dtype=np.int64), size.text)

    def place(self, text: str, expansions: Sequence[Expansion]) -> Placed:
        """Match placeholders with items, each kind in its order, and write in those that are text.

        Raises:
            DataError: There are more or fewer placeholders than items.
        """
        waiting: dict[str, list[Expansion]] = {kind: [] for kind in self._placeholders}
        for expansion in expansions:
            if expansion.kind in waiting:
                waiting[expansion.kind].append(expansion)
        found = list(self._pattern.finditer(text)) if self._pattern is not None else []
        for kind, items in waiting.items():
            count = sum(match.lastgroup == kind for match in found)
            if count != len(items):
                raise DataError(
                    f"the rendered text has {count} {kind} tokens for {len(items)} {kind}s: "
                    f"{without_marks(text)[:2000]!r}",
                    way_out=f"The chat template must write one {kind} token for each {kind}, and no text may hold one.",
                )
        pieces, places, shifts, position, grown = [], [], [], 0, 0
        queues = {kind: iter(items) for kind, items in waiting.items()}
        of_text = iter(self._items_of_text(text, found))
        for match in found:
            item, behind = next(queues[match.lastgroup or ""]), ""
            if match.lastgroup == "image" and (by_processor := next(of_text, None)) is not None:
                item, behind = item._replace(text=by_processor.text), by_processor.behind
            written = match.group() if item.text is None else item.text
            pieces += [text[position : match.start()], written, behind]
            start = match.start() + grown
            places.append(((start, start + len(written)), item))
            position, grown = match.end(), grown + len(written + behind) - len(match.group())
            if item.text is not None:
                shifts.append((match.end(), grown))
        return Placed("".join([*pieces, text[position:]]) if shifts else text, places, shifts)

    def _items_of_text(self, text: str, found: Sequence[re.Match[str]]) -> Sequence[WrittenItem]:
        if self._write_items is None or all(match.lastgroup != "image" for match in found):
            return ()
        return self._write_items(with_stand_ins(text)) or ()

    def token_places(self, placed: Placed, encoding: Encoding) -> list[tuple[Span, np.ndarray]]:
        """The tokens at which each item stands, and those that are to stand there.

        Raises:
            DataError: The tokenizer does not know the placeholder as one token.
        """
        places = []
        for span, item in placed.items:
            first, end = token_span(encoding, span)
            if item.text is not None:
                places.append(((first, end), np.array(encoding.ids[first:end], dtype=np.int64)))
                continue
            placeholder = self._placeholders[item.kind]
            if end - first != 1 or encoding.ids[first] != placeholder.token_id:
                raise DataError(f"the tokenizer does not know '{placeholder.text}' as one token")
            places.append(((first, end), item.token_ids))
        return places
