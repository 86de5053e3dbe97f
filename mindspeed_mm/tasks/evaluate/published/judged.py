"""Sets whose authors let a language model find the answer in what was said, before their rule compares it: MathVista
(Lu et al. 2024), and MMBench where its rule finds no option (Liu et al. 2024).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_mm.tasks.evaluate.judge import Judge
from mindspeed_mm.tasks.evaluate.published import rules
from mindspeed_mm.tasks.evaluate.published.item import Item

_INSTRUCTION = (
    "Somebody was asked the question below, and said what stands below it. What is the answer that was given, whether "
    "it is right or wrong? Say {form}, and nothing else. If no answer was given, say none.\n\n"
    "Question: {question}\n\nSaid: {given}"
)
_NONE = re.compile(r"\W*none\W*", re.IGNORECASE)
_SHOWN = 60
_FORMS = {
    "integer": "it as a whole number in digits",
    "float": "it as a number in digits",
    "list": "it as a list in brackets",
}


@dataclass(frozen=True)
class Found:
    """What a judge has found in an answer."""

    said: str | None = None
    failure: str | None = None
    """Why it said nothing."""

    def words(self, given: str, item: Item) -> str:
        """What the set's rule reads: what was found, or all that was said where nothing could be."""
        if self.said is None:
            return given
        if item.options and _NONE.fullmatch(self.said):
            return ""  # an option may be called so, too
        return self.said


def found_answers(
    judge: Judge, asks: rules.AsksJudge, items: Sequence[Item], given: Sequence[str], *, takes_nearest: bool
) -> dict[int, Found]:
    """By place: what a judge finds in the answers that the set's authors would ask about.

    Args:
        judge: It is asked.
        asks: Whether they would.
        items: The questions, read as they are needed.
        given: What the model said to each, without its thoughts.
        takes_nearest: A reply that names no option stands for the nearest one; else it is told as a failure.
    """
    asked: dict[int, dict[str, str]] = {}
    for place, words in enumerate(given):
        item = items[place]
        if words and asks(words, item):
            asked[place] = {"{form}": _form(item), "{question}": item.prompt, "{given}": words}
    found = {}
    replies = judge.replies(_INSTRUCTION, list(asked.values()))
    for place, reply in zip(asked, replies, strict=True):
        said, failure = reply
        options = items[place].options
        if said is not None and options and not _NONE.fullmatch(said):
            if takes_nearest:
                said = rules.nearest_option(said, options)
            elif rules.chosen_letter(said, options) is None:
                failure = f"it says '{said[:_SHOWN]}', which names no option"
                said = None
        found[place] = Found(said, failure)
    return found


def _form(item: Item) -> str:
    if item.options:
        return "the letter of the option that it is"
    return _FORMS.get(item.facts.get("answer_type", ""), "it in a few words")


def told(found: Found) -> dict[str, Any]:
    """Return a judge's finding as the samples file holds it, under `said` and `failure`."""
    return {"said": found.said, "failure": found.failure}


def failures(found: Mapping[int, Found]) -> int:
    """How many answers a judge was asked about in vain."""
    return sum(one.failure is not None for one in found.values())
