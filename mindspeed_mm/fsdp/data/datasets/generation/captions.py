"""Captions of a row: what is made of those that stand in the data, and which of several is trained on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspeed_mm.core.errors import ConfigError, DataError, Problem
from mindspeed_mm.core.json_file import JsonMapping, parse_json
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation

_KEY = "data.dataset_param.basic_parameters"
_PLACE = "[trigger]"
"""Where a caption wants the trigger word; without it the word stands in front."""


@dataclass(frozen=True)
class CaptionRules:
    """The keys of `basic_parameters` that change captions; see the card.

    A caption becomes a fixed list of captions, and an epoch draws one of the list as it does where a row has several:
    so extraction can encode all of them, and features and raw media train the same.
    """

    trigger_word: str | None = None
    shuffle_tags: bool = False
    keep_tags: int = 0
    tag_dropout: float = 0.0
    caption_variants: int = 4

    @classmethod
    def read(cls, basic: JsonMapping | Any) -> CaptionRules:
        """Out of the configuration.

        Raises:
            ConfigError: A value is of the wrong kind; all such are reported at once.
        """
        given: dict[str, Any] = {}
        problems = []
        for name, (is_right, words) in _ALLOWED.items():
            value = basic.get(name)
            if value is None:
                continue
            given[name] = value
            if not is_right(value):
                problems.append(Problem(f"{value!r} is not {words}", key=f"{_KEY}.{name}"))
        if problems:
            raise ConfigError("captions cannot be changed so", problems=problems)
        return cls(**given)

    def __call__(self, captions: tuple[str, ...]) -> tuple[str, ...]:
        """The captions of a row as they are trained on, each once."""
        if self.shuffle_tags or self.tag_dropout > 0:
            made: list[str] = []
            for caption in captions:
                for number in range(self.caption_variants):
                    made.append(self._with_trigger(self._varied(caption, number)))
            return tuple(dict.fromkeys(made))
        if self.trigger_word:
            return tuple(dict.fromkeys(map(self._with_trigger, captions)))
        return captions

    def _varied(self, caption: str, number: int) -> str:
        """A variation of comma-separated tags, a function of the caption and its number alone."""
        tags = [tag.strip() for tag in caption.split(",") if tag.strip()]
        kept, others = tags[: self.keep_tags], tags[self.keep_tags :]
        draw = random.Random(derive_seed(caption, number, "tags"))
        others = [tag for tag in others if draw.random() >= self.tag_dropout]
        if self.shuffle_tags:
            draw.shuffle(others)
        return ", ".join(kept + others)

    def _with_trigger(self, caption: str) -> str:
        word = self.trigger_word
        if not word:
            return caption
        if _PLACE in caption:
            return caption.replace(_PLACE, word)
        if word in caption:
            return caption
        if caption.strip():
            return f"{word}, {caption}"
        return word


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_share_below_1(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


_ALLOWED: dict[str, tuple[Callable[[object], bool], str]] = {
    "trigger_word": (lambda value: isinstance(value, str), "text"),
    "shuffle_tags": (lambda value: isinstance(value, bool), "true or false"),
    "keep_tags": (lambda value: _is_count(value, 0), "a whole number from 0 on"),
    "tag_dropout": (_is_share_below_1, "a share from 0 to below 1"),
    "caption_variants": (lambda value: _is_count(value, 1), "a whole number above 0"),
}
"""Key → what it may hold, and its words."""


def drawn_caption(seed: int, epoch: int, sample_id: str, captions: int) -> int:
    """Number of the caption that a sample has in an epoch: a function of these alone, the same for features and raw
    media, for every batch size, number of ranks and resume.

    Args:
        seed: `training.seed`.
        epoch: From 0.
        sample_id: See `rows.content_key`.
        captions: How many there are.
    """
    return derive_seed(seed, epoch, sample_id, "caption") % captions


def drawn_view(seed: int, epoch: int, sample_id: str, views: int) -> int:
    """Number of the view that is seen of a sample in an epoch, as `drawn_caption`."""
    return derive_seed(seed, epoch, sample_id, "view") % views


def repeated_id(sample_id: str, repeat: int) -> str:
    """Id of one of the samples that an epoch makes of a row: each has its own caption, σ and noise.

    Args:
        sample_id: Of the row.
        repeat: From 0.
    """
    if repeat:
        return f"{sample_id}+{repeat}"
    return sample_id


def captions_of(found: tuple[str, object], place: RowLocation) -> tuple[str, ...]:
    """The captions in a column, (name, value): a text, a list of texts, or such a list in a cell of a table.

    Raises:
        DataError: It is neither.
    """
    name, value = found
    captions = value
    if isinstance(value, str):
        captions = [value]
        if place.file.endswith(".csv") and value.lstrip().startswith("["):
            captions = _listed(value)
    if not isinstance(captions, list) or not captions or not all(isinstance(caption, str) for caption in captions):
        shown = str(value)[:60]
        raise DataError(
            f"{shown!r} is neither a caption nor a list of them", where=str(place), key=name, way_out="Give text."
        )
    return tuple(captions)


def _listed(text: str) -> list[object]:
    """A list in a cell of a table; a caption may also just start with a bracket."""
    try:
        found = parse_json(text)
    except ValueError:
        return [text]
    if isinstance(found, list):
        return found
    return [text]
