"""What processors write for pictures among words, where it is not what they write for each picture alone.

Most replace a placeholder by a text of its own. Idefics2's lets neighbouring pictures share a border, and puts a space
between a picture and a word: there the processor itself is asked to write the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import MediaFeatures
from mindspeed_mm.fsdp.utils.model_parts import attribute_at
from mindspeed_mm.fsdp.utils.processor import tokenizer_of

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.utils.processor import Processor

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
        return tuple(made[len(ours) :]) if made[: len(ours)] == ours else None


def without(borders: Collection[int | None], ids: Sequence[int]) -> list[int]:
    """Token ids without those that begin and end texts."""
    return [number for number in ids if number not in borders]


class _Recorder:
    """A tokenizer that keeps the texts that it is called with."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.texts = tokenizer, list[str]()

    def __call__(self, texts: Sequence[str], **options: Any) -> Mapping[str, Any]:
        self.texts += [texts] if isinstance(texts, str) else texts
        made: Mapping[str, Any] = self._tokenizer(texts, **options)
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
