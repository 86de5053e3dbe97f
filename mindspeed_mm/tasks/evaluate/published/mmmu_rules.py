"""How MMMU's authors read an answer (Yue et al. 2024, section 4.1; `eval_utils.py` of the set's repository)."""

from __future__ import annotations

import re
from collections.abc import Mapping

_OUTER_MARKS = ",.!?;:'"
_LEADS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
"""What is said in front of a result; the shortest text behind one of them is the line's result."""
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?\d+(?:\.\d+)?e[+-]?\d+"),
    re.compile(r"-?(?:\d*\.\d+|\d+\b)(?!e[+-]?\d|[,\d])"),
)
"""With thousands set apart, with an exponent, and all others."""
_LONG_ANSWER = 5
"""Words; only in answers of more are the options' own words looked for."""


def last_named_letter(answer: str, options: Mapping[str, str]) -> str | None:
    """The option that is named last, by "(B)", else " B ", else in a long answer by its own words; None where none is
    named. Of several that are named by "B." alone it is the first option: the authors' script looks for the last " B "
    then, and finds none."""
    for mark in _OUTER_MARKS:
        answer = answer.strip(mark)
    answer = f" {answer} "
    for form in ("({})", " {} "):
        if last := _last(answer, {letter: form.format(letter) for letter in options}):
            return last
    if first := next((letter for letter in options if f"{letter}." in answer), None):
        return first
    if len(answer.split()) > _LONG_ANSWER:
        return _last(answer.lower(), {letter: text.lower() for letter, text in options.items()})
    return None


def _last(text: str, names: Mapping[str, str]) -> str | None:
    places = {letter: text.rfind(name) for letter, name in names.items() if name}
    latest = max(places, key=places.__getitem__, default=None)
    if latest is None or places[latest] < 0:
        return None
    return latest


def says(answer: str, gold: str) -> bool:
    """Whether one of the results that an answer states, or a number in them, is the right one: a number to two
    decimals, a text within the result."""
    wanted = _comparable(gold)
    forms = [str(wanted)]
    if isinstance(wanted, str) and len(wanted) == 1:
        # A lone letter stands in most words: it has to stand at the border of one.
        forms = [f" {wanted}", f"{wanted} "]
    said = _stated_results(answer)
    for text in tuple(said):
        for pattern in _NUMBERS:
            said += pattern.findall(text)
    for found in map(_comparable, said):
        if isinstance(wanted, float) or isinstance(found, float):
            if found == wanted:
                return True
        elif any(form in found for form in forms):
            return True
    return False


def _stated_results(answer: str) -> list[str]:
    lines = answer.strip().strip(".").lower().split("\n")
    results = []
    for number, line in enumerate(lines, 1):
        leads: tuple[str, ...] = _LEADS
        if number == len(lines):
            leads = (*_LEADS, "=")
        tails = [line.rsplit(lead, 1)[1].strip() for lead in leads if lead in line]
        shortest = min(filter(None, tails), key=len, default="")
        if shortest and shortest not in _OUTER_MARKS:
            results.append(shortest)
    return results or ["\n".join(lines)]


def _comparable(text: str) -> float | str:
    text = text.strip().lower()
    try:
        return round(float(text.replace(",", "")), 2)
    except ValueError:
        return text
