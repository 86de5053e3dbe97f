"""Media in a rendered conversation: what processors write for them, which placeholder is whose, and what takes its
place.

Items whose tokens are a run of special tokens are put in after tokenisation, so that nothing can be cut or shifted in
between; the others (times of frames, line breaks) are written into the text before, for their tokens depend on their
neighbours. Most processors replace a placeholder by a text of its own. Idefics2's lets neighbouring pictures share a
border, and puts a space between a picture and a word: there the processor itself is asked to write the whole text.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import ItemSize, MediaFeatures, Placeholder
from mindspeed_mm.fsdp.data.data_utils.rendering.spans import Span
from mindspeed_mm.fsdp.data.data_utils.rendering.tokens import (
    PROTECTED,
    Encoding,
    token_span,
    with_stand_ins,
    without_marks,
)
from mindspeed_mm.fsdp.utils.model_parts import attribute_at
from mindspeed_mm.fsdp.utils.processor import tokenizer_of

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.utils.processor import Processor


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
                token = self._placeholders[kind].text
                raise DataError(
                    f"the rendered text has {count} {kind} tokens for {len(items)} {kind}s: "
                    f"{without_marks(text)[:2000]!r}",
                    way_out=f"The chat template must write one {kind} token ({token}) for each {kind}, and no text may "
                    "hold one.",
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


_ONE = ("{0}b", "a{0}b", "a {0}", "a\n{0}\nb", "{0}{end}b")
_SEVERAL = ("a{0}{1}b{0}", "{1}{0}{1}{end}b", "{0}\n{1} c {0}")
"""Texts around one picture and around several of two sizes: glued to words, apart, next to each other, in two turns."""


class WrittenItem(NamedTuple):
    """What a processor writes in the place of one placeholder of a text."""

    text: str
    behind: str
    """What it puts between the item and the text that follows."""


WriteItems = Callable[[str], Sequence[WrittenItem] | None]
"""The method `written_items` of a media plugin: a text with the placeholders of pictures → what the processor writes
for each; None where every picture's own features say it."""


def write_items_of(plugin: object) -> WriteItems | None:
    """The method `written_items` of a media plugin; None where it has none."""
    found: WriteItems | None = attribute_at(plugin, "written_items")
    return found


class Ask(NamedTuple):
    """A text with pictures that a processor is shown."""

    text: str
    pictures: tuple[int, ...]
    """Which of the two pictures stands at each placeholder."""


class TextWriter:
    """Lets a processor write whole texts, without their pictures.

    Args:
        processor: Writes every picture alike, whatever its size.
        placeholder: Text that stands for a picture, and for each of its tokens.
    """

    def __init__(self, processor: Processor, placeholder: str) -> None:
        self._processor, self._placeholder = processor, placeholder
        alone = self._write(placeholder)
        self._tokens = alone.count(placeholder)
        self._lead, self._trail = alone.partition(placeholder)[0], alone.rpartition(placeholder)[2]

    def with_items(self, text: str) -> str:
        """A text with what the processor writes for its pictures."""
        first, *words = text.split(self._placeholder)
        written = [first]
        for item, following in zip(self.items(text), words, strict=True):
            written += [item.text, item.behind, following]
        return "".join(written)

    def items(self, text: str) -> list[WrittenItem]:
        """What the processor writes for each picture of a rendered text, in order.

        Raises:
            DataError: It changes the words, too.
        """
        words, pieces = text.split(self._placeholder), self._write(text).split(self._placeholder)
        if len(pieces) - 1 != self._tokens * (len(words) - 1) or pieces[0] != words[0] + self._lead:
            raise self._changed(text)
        items, lead = [], self._lead
        for number, following in enumerate(words[1:], start=1):
            inner = pieces[self._tokens * (number - 1) + 1 : self._tokens * number]
            gap, is_last = pieces[self._tokens * number], number == len(words) - 1
            body = lead + self._placeholder + "".join(between + self._placeholder for between in inner)
            if following or is_last:
                lead = "" if is_last else self._lead
                behind = gap.removeprefix(self._trail).removesuffix(lead).removesuffix(following)
                if gap != self._trail + behind + following + lead or behind.strip():
                    raise self._changed(text)
                items.append(WrittenItem(body + self._trail, behind))
            else:  # the next picture follows at once: what stands between them is this one's
                lead = ""
                items.append(WrittenItem(body + gap, ""))
        return items

    def _write(self, text: str) -> str:
        """The text that the processor hands to its tokenizer."""
        listening = copy(self._processor)
        recorder = _Recorder(tokenizer_of(self._processor))
        listening.tokenizer = recorder
        listening(text=[text])
        if len(recorder.texts) != 1:
            raise self._changed(text)
        return recorder.texts[0]

    def _changed(self, text: str) -> DataError:
        return DataError(
            f"{type(self._processor).__name__} changes more of the text than its pictures: {text[:2000]!r}",
            way_out="Drop the row, or write a media plugin for this processor: `register_mm_plugin` (docs/data.md, B).",
        )


class WritingProbe:
    """Shows a processor texts with pictures, to see whether it writes for each what it writes for that picture alone.

    Args:
        processor: Is shown the texts.
        placeholder: Text that stands for a picture.
        show: (text, which of two pictures stands at each placeholder) → token ids of the processor's own call.
        alone: What it makes of each of the two pictures alone.
        borders: Tokens that begin and end texts, which templates write themselves.
    """

    def __init__(
        self,
        processor: Processor,
        placeholder: str,
        show: Callable[[str, Sequence[int]], list[int]],
        alone: Sequence[MediaFeatures],
        borders: Collection[int | None],
    ) -> None:
        self._processor, self._tokenizer = processor, tokenizer_of(processor)
        self._placeholder, self._show, self._alone, self._borders = placeholder, show, alone, borders

    def find_writer(self, *, with_several: bool) -> TextWriter | None:
        """The processor as a writer of whole texts; None where its texts hold what it writes for each picture alone.

        Args:
            with_several: Show texts with several pictures, too.

        Raises:
            ValueError: What it writes depends on the words around a picture and on the picture; or what the processor
                raises where it refuses a picture among words.
        """
        shown = {Ask(self._placeholder, (0,)): self._show(self._placeholder, (0,))}
        for ask in self._asks(_ONE):
            shown[ask] = self._show(*ask)
        with suppress(ValueError, RuntimeError, TypeError, LookupError, AttributeError):  # it may take a single picture
            for ask in self._asks(_SEVERAL) if with_several else ():
                shown[ask] = self._show(*ask)
        ends = {self._rest(ask, theirs) for ask, theirs in shown.items()}
        if len(ends) == 1 and None not in ends:  # it may end every text alike
            return None
        writer = TextWriter(self._processor, self._placeholder)
        for ask, theirs in shown.items():
            ours = self._tokenizer(writer.with_items(ask.text))["input_ids"]
            if without(self._borders, ours) != without(self._borders, theirs):
                raise ValueError(f"without its pictures, it writes another text for {ask.text!r}")
        return writer

    def _asks(self, texts: Sequence[str]) -> list[Ask]:
        asks = []
        for text in texts:
            order = tuple(int(number) for number in re.findall(r"\{([01])\}", text))
            end = str(self._tokenizer.eos_token or "")
            asks.append(Ask(text.format(self._placeholder, self._placeholder, end=end), order))
        return asks

    def _rest(self, ask: Ask, theirs: Sequence[int]) -> tuple[int, ...] | None:
        """What the processor writes behind a text into which the tokens of each picture alone are put; None where it
        writes another text."""
        text, *words = ask.text.split(self._placeholder)
        runs = {}
        for number, following in zip(ask.pictures, words, strict=True):
            item = self._alone[number]
            if item.text is None:
                runs[len(text)] = item.token_ids.tolist()
            text += (self._placeholder if item.text is None else item.text) + following
        encoding = self._tokenizer(text)
        of_tokens = {encoding.char_to_token(at): run for at, run in runs.items()}
        ids: list[int] = []
        for number, token in enumerate(encoding["input_ids"]):
            ids += of_tokens.get(number, [token])
        ours, made = without(self._borders, ids), without(self._borders, theirs)
        if made[: len(ours)] == ours:
            return tuple(made[len(ours) :])
        return None


def without(borders: Collection[int | None], ids: Sequence[int]) -> list[int]:
    """Token ids without those that begin and end texts."""
    return [number for number in ids if number not in borders]


class _Recorder:
    """A tokenizer that keeps the texts that it is called with."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.texts = tokenizer, list[str]()

    def __call__(self, texts: Sequence[str], **options: Any) -> Mapping[str, Any]:
        self.texts += [texts] if isinstance(texts, str) else texts
        made: JsonMapping = self._tokenizer(texts, **options)
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
