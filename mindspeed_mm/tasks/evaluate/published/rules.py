"""What counts as a right answer in published sets, by their authors' rules. Each rule gives a share from 0 to 1."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import jiwer

from mindspeed_mm.tasks.evaluate.published.item import Item

_LEADING = re.compile(r"^\W*([A-Z])(?:[.:)\]]|\s*$)")
_NAMED = (
    re.compile(r"(?i:answer)\s*(?i:is|:)?\s*\**\(?([A-Z])\b(?!\s+[a-z])"),
    re.compile(r"(?i:answer)\s*:\s*\**\(?([a-z])\)?\W*$"),
    re.compile(r"(?i:option|choice)\s*(?i:is|:)?\s*\**\(?([A-Z])\b"),
)
"""A letter that the words in front of it make the answer; a small one only behind a colon at the end, for "a" is also
an article."""
_ALONE = re.compile(r"(?<![A-Za-z'])\(?([A-Z])\)?(?![A-Za-z'])")
_WORD = re.compile(r"[AI]\s+(?!(?:or|and|is|because|since)\b)[a-z]")
"""A letter that is an article or a pronoun."""
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?\.\d+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


AsksJudge = Callable[[str, Item], bool]
"""Whether a set's authors let a language model find the answer in what was said."""


def names_no_option(answer: str, item: Item) -> bool:
    """MMBench: no option is found by rules."""
    return chosen_letter(answer, item.options) is None


def nearest_option(said: str, options: Mapping[str, str]) -> str:
    """The letter of the option whose text is nearest to what was said by edit distance, the first of equals (Lu et al.
    2024, MathVista's script); what was said where it names an option, or nothing."""
    if not options or not said.strip() or chosen_letter(said, options) is not None:
        return said
    return min(options, key=lambda letter: _edits(said.strip(), options[letter]))


def says_more(answer: str, item: Item) -> bool:
    """MathVista: what was said is not the answer alone."""
    said = _plain(answer)
    if item.options:
        return said.upper() not in item.options and said not in map(_plain, item.options.values())
    if item.facts.get("answer_type") in ("integer", "float"):
        return _number(said) is None
    return True


def chosen_letter(answer: str, options: Mapping[str, str]) -> str | None:
    """The option that an answer names: by its letter, else by its text; None where it names none, or several."""
    for pattern in (_LEADING, *_NAMED):
        said = map(str.upper, pattern.findall(answer.strip()))
        letters = [letter for letter in said if letter in options]
        if letters:
            return letters[-1]  # "Option A is wrong, option B is right"
    alone = _lone_letters(answer) & options.keys()
    if len(alone) == 1:
        return alone.pop()
    return _quoted_option(answer, options)


def _lone_letters(answer: str) -> set[str]:
    """Capitals that stand by themselves and are no words."""
    found = set()
    for letter in _ALONE.finditer(answer):
        if not _WORD.match(letter[1] + answer[letter.end() :]):
            found.add(letter[1])
    return found


def _quoted_option(answer: str, options: Mapping[str, str]) -> str | None:
    """The option whose text is in an answer; of several the longest, for a text may hold another."""
    said = _plain(answer)
    lengths: dict[str, int] = {}
    for letter, text in options.items():
        if text and _plain(text) in said:
            lengths[letter] = len(text)
    longest = max(lengths.values(), default=0)
    named = [letter for letter, length in lengths.items() if length == longest]
    if len(named) != 1:
        return None
    return named[0]


def choice(answer: str, item: Item) -> float:
    """Return 1.0 if the option that the answer chooses is the right one, else 0.0."""
    return float(chosen_letter(answer, item.options) in item.gold)


def choice_in_any_case(answer: str, item: Item) -> float:
    """The right option; an answer that is nothing but a letter counts in either case, punctuation apart, as lmms-eval
    compares answers of AI2D (`exact_match` with `ignore_case` and `ignore_punctuation`)."""
    letter = re.sub(r"[^\w\s]", "", answer).strip().upper()
    if letter in item.options:
        return float(letter in item.gold)
    return choice(answer, item)


def exact_or_choice(answer: str, item: Item) -> float:
    """The right option, or where there are none the right word, case and a full stop apart (RealWorldQA)."""
    if item.options:
        return choice(answer, item)
    return _is_one_of(answer, item.gold)


def mmmu(answer: str, item: Item) -> float:
    """The option that is named last, or in an open question a result that is the right one.

    Where an answer names no option by their rule, MMMU's authors draw one. A draw of ours would not be the model's: it
    is read as that of any other set, and counts as wrong if nothing is found.
    """
    if not item.options:
        return float(any(says(answer, gold) for gold in item.gold))
    letter = last_named_letter(answer, item.options) or chosen_letter(answer, item.options)
    return float(letter in item.gold)


def relaxed(answer: str, item: Item) -> float:
    """A number within 5 % of the right one, anything else word for word (Masry et al. 2022, ChartQA, section 5.1)."""
    for gold in item.gold:
        said, wanted = _number(answer), _number(gold)
        if said is not None and wanted:
            if abs(said - wanted) <= 0.05 * abs(wanted):
                return 1.0
        elif _plain(answer) == _plain(gold):
            return 1.0
    return 0.0


def anls(answer: str, item: Item) -> float:
    """Average normalised Levenshtein similarity, nothing below one half (Biten et al. 2019, ICDAR, equation 1; one half
    itself counts, as in the organisers' script). As there, edits are counted between texts with single blanks, and
    divided by the length of the longer text as it is written."""
    return max(_similarity(answer, gold) for gold in item.gold)


def _similarity(said: str, wanted: str) -> float:
    longer = max(len(said), len(wanted))
    if longer == 0:
        return 1.0
    distance = _edits(_collapsed(said), _collapsed(wanted)) / longer
    if distance <= 0.5:
        return 1 - distance
    return 0.0


def _edits(said: str, wanted: str) -> int:
    """Return Levenshtein's edit distance between two texts, counted in characters."""
    if not said or not wanted:
        return max(len(said), len(wanted))
    found = jiwer.process_characters(wanted, said)
    return int(found.substitutions + found.deletions + found.insertions)


def vqa(answer: str, item: Item) -> float:
    """Agreement with ten people: the mean, over leaving each of them out, of min(1, matches / 3) (Antol et al. 2015,
    VQA; Singh et al. 2019, TextVQA)."""
    said = _vqa_words(answer)
    agrees = [_vqa_words(gold) == said for gold in item.gold]
    shares = []
    for left_out in agrees:
        matches = sum(agrees) - left_out
        shares.append(min(1.0, matches / 3))
    return sum(shares) / len(shares)


_FORMULAS = frozenset({"HME100k", "Handwritten Mathematical Expression Recognition"})
"""The data set, or the kind, of rows that are handwritten formulas."""


def contains(answer: str, item: Item) -> float:
    """A right answer stands somewhere in what was said (Liu et al. 2024, OCRBench, section 3); of handwritten formulas
    without blanks."""
    plain = _collapsed
    if _FORMULAS.intersection(item.facts.values()):
        plain = _without_blanks
    said = plain(answer)
    return float(any(plain(gold) in said for gold in item.gold))


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def typed(answer: str, item: Item) -> float:
    """The right option, or the last number of the answer at the precision asked for (Lu et al. 2024, MathVista).

    Its authors let a language model find the answer in the text. This is the part of their rule that needs none:
    figures by it are lower, and are named so.
    """
    if item.options:
        return choice(answer, item)
    kind = item.facts.get("answer_type", "text")
    if kind not in ("integer", "float"):
        return _is_one_of(answer, item.gold)
    numbers, wanted = _numbers(answer), _number(item.gold[0])
    if not numbers or wanted is None:
        return 0.0
    if kind == "integer":
        return float(int(numbers[-1]) == int(wanted))
    digits = int(float(item.facts.get("precision") or 0))
    return float(round(numbers[-1], digits) == round(wanted, digits))


def _is_one_of(answer: str, golds: Sequence[str]) -> float:
    return float(_plain(answer) in map(_plain, golds))


def _numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in _NUMBER.findall(text)]


def _number(text: str) -> float | None:
    """A text that is one number; a percentage is its share. ChartQA's script strips all of several signs."""
    text = _THOUSANDS.sub("", text.strip().rstrip("."))
    scale = 100 if text.endswith("%") else 1
    try:
        return float(text.rstrip("%")) / scale
    except ValueError:
        return None


def _collapsed(text: str) -> str:
    return " ".join(text.lower().split())


def _plain(text: str) -> str:
    return _collapsed(text).rstrip(".")


_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMERALS = {"none": "0", **{word: str(number) for number, word in enumerate(_WORDS)}}
_ARTICLES = {"a", "an", "the"}
_PUNCTUATION = ';/[]"{}()=+\\_-><@`!'
_CONTRACTED = re.compile(r"(?<=n)'(?=t(?:'?ve)?\b)|'(?=ve\b)")
_STEMS = {
    "ll": ("how", "it", "somebody", "someone", "something", "they", "what", "who", "why", "y'all", "you"),
    "d": ("he", "how", "it", "somebody", "someone", "something", "there", "they", "where", "who", "you"),
    "dve": ("he", "it", "she", "somebody", "someone", "something", "there", "they", "we", "who", "y'all", "you"),
    "re": ("there", "they", "what", "why", "you"),
}
"""Ending of a contraction → what it stands behind: there it does not count whether the apostrophe is written."""
_WHOLE = {"ma'am", "o'clock", "'twas", "y'all"}


def _vqa_words(text: str) -> str:
    """As VQA's and TextVQA's evaluation makes answers alike: without articles, numerals in digits, a mark of
    punctuation gone where a blank stands beside one of its kind and a blank elsewhere, a point gone unless a digit
    follows it. Marks that it does not list ($, %, #, &, :) stay.

    Of a contraction that its table lists the apostrophe does not count, nor does that of 've behind any word.
    """
    text = " ".join(text.lower().replace(",", "").replace("?", "").replace("'s", " 's").split())
    gone: dict[str, str | int | None] = {}
    # All of a kind of mark go where one of them stands beside a blank.
    for mark in _PUNCTUATION:
        stands_apart = f"{mark} " in text or f" {mark}" in text
        gone[mark] = "" if stands_apart else " "
    text = text.translate(str.maketrans(gone))
    text = re.sub(r"\.(?!\d)", "", _CONTRACTED.sub("", text))
    words = [_uncontracted(word) for word in text.split() if word not in _ARTICLES]
    return " ".join(_NUMERALS.get(word, word) for word in words)


def _uncontracted(word: str) -> str:
    """A word that the table lists without its apostrophes; any other as it is."""
    if word in _WHOLE:
        return word.replace("'", "")
    for ending, stems in _STEMS.items():
        stem = word.removesuffix(ending).removesuffix("'")
        if word.endswith(ending) and (stem in stems or (stem == "yall" and "y'all" in stems)):
            return word.replace("'", "")
    return word


# --- MMMU -------------------------------------------------------------------------------------------------------------
# How MMMU's authors read an answer (Yue et al. 2024, section 4.1; `eval_utils.py` of the set's repository).

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
