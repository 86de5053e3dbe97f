"""One question of a published set, and what makes it a row that a model is asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.sampling.answers.questions import Question, question_of


@dataclass(frozen=True)
class Item:
    """A question with what is right."""

    id: str
    task: str
    """What results are told by: a subject, a kind of question, a part of the set."""
    prompt: str
    """`<image 2>` stands where the second picture is named; media that are not named come first."""
    gold: tuple[str, ...]
    """Every answer that is right; of a choice, the letter."""
    media: Callable[[], Mapping[str, list[Any]]] = dict
    """Reads `images`, `videos`, `audios`: paths, or objects with the bytes."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Letter → text of a choice."""
    group: str = ""
    """Items of one group count together: each must be right."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What the rule of the set asks for besides."""

    def question(self, row: int) -> Question:
        """It as a model is asked."""
        media = dict(self.media())
        prompt, pictures = _in_place(self.prompt, media.get("images", []))
        if pictures:
            media["images"] = pictures
        marks = ""
        for kind, items in media.items():
            mark = f"<{kind.removesuffix('s')}>"
            marks += mark * (len(items) - prompt.count(mark))
        turns = [{"role": "user", "content": marks + prompt}, {"role": "assistant", "content": self.gold[0]}]
        place = RowLocation(self.id, row)
        sample, _ = question_of({"messages": turns, **media}, RowFormat(), place, needs_answer=True)
        return Question(row, self.id, self.task, sample, self.gold[0])


def _in_place(prompt: str, pictures: Sequence[object]) -> tuple[str, list[object]]:
    """The text with `<image>` where it names a picture, and the pictures: those that it does not name first, the others
    as it names them."""
    by_mark = {f"<image {number}>": picture for number, picture in enumerate(pictures, 1)}
    named = [mark for mark in re.findall(r"<image \d+>", prompt) if mark in by_mark]
    unnamed = [mark for mark in by_mark if mark not in named]
    for mark in by_mark:
        prompt = prompt.replace(mark, "<image>")
    return prompt, [by_mark[mark] for mark in (*unnamed, *named)]


def with_options(prompt: str, options: Mapping[str, str]) -> str:
    """A question and what there is to choose from, a line each."""
    return "\n".join([prompt, *(f"{letter}. {text}" for letter, text in options.items())])
