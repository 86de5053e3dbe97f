"""Rewards by rule, of texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.posttrain_rewards.registry import Row, needed_solution, reward_register

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")
_THOUGHT = re.compile(r"\s*<think>(?!.*<think>)(.*?)</think>(?!.*</think>)\s*\S.*", re.DOTALL)


@reward_register.register("exact_match")
def exact_match(
    prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Row], *, ignore_case: bool = False
) -> list[float]:
    """1 where the completion is the solution, spaces around both aside."""
    same = str.casefold if ignore_case else str
    return _against_solutions("exact_match", completions, rows, lambda text, truth: same(text) == same(truth))


@reward_register.register("contains")
def contains(
    prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Row], *, ignore_case: bool = True
) -> list[float]:
    """1 where the solution stands somewhere in the completion."""
    same = str.casefold if ignore_case else str
    return _against_solutions("contains", completions, rows, lambda text, truth: same(truth) in same(text))


@reward_register.register("number")
def number(
    prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Row], *, tolerance: float = 1e-6
) -> list[float]:
    """1 where the last number of the completion is the last number of the solution, to a relative tolerance."""

    def agrees(text: str, truth: str) -> bool:
        said, right = _last_number(text), _last_number(truth)
        return said is not None and right is not None and abs(said - right) <= tolerance * max(1.0, abs(right))

    return _against_solutions("number", completions, rows, agrees)


@reward_register.register("regex")
class RegexReward:
    """1 where the pattern is found in the completion; `^` and `$` are the ends of the whole."""

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except (re.error, TypeError) as error:
            raise ConfigError(
                f"{pattern!r} is no regular expression: {error}",
                key="posttrain.rewards",
                way_out="Write the setting `pattern` of the reward 'regex' as Python's re takes it.",
            ) from error

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Row]) -> list[float]:
        """One score a completion, in order."""
        return [float(self._pattern.search(text) is not None) for text in completions]


@reward_register.register("think_format")
def think_format(prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Row]) -> list[float]:
    """1 where the completion is one thought between `<think>` and `</think>` and an answer behind it."""
    return [float(_THOUGHT.fullmatch(text) is not None) for text in completions]


@reward_register.register("json")
def is_json(
    prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Row], *, keys: Sequence[str] = ()
) -> list[float]:
    """1 where the completion is JSON: an object with these keys, where some are named."""

    def fits(text: str) -> bool:
        try:
            value = parse_json(text)
        except ValueError:
            return False
        return not keys or (isinstance(value, dict) and all(key in value for key in keys))

    return [float(fits(text)) for text in completions]


@reward_register.register("length")
def length(
    prompts: Sequence[str],
    completions: Sequence[str],
    rows: Sequence[Row],
    *,
    completion_ids: Sequence[Sequence[int]],
    max_tokens: int,
    soft_tokens: int = 0,
) -> list[float]:
    """0 up to `max_tokens − soft_tokens` tokens, falling to −1 at `max_tokens` (DAPO, arXiv:2503.14476, eq. 13)."""
    free = max_tokens - soft_tokens
    scores = []
    for ids in completion_ids:
        tokens = len(ids)
        if tokens <= free:
            scores.append(0.0)
        elif tokens > max_tokens:
            scores.append(-1.0)
        else:
            scores.append((free - tokens) / soft_tokens)
    return scores


@reward_register.register("repetition")
def repetition(
    prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Row], *, words: int = 3, most: float = 1.0
) -> list[float]:
    """−`most` × the share of runs of so many words that stand in the completion before."""

    scores = []
    for text in completions:
        said = text.split()
        runs = [tuple(said[i : i + words]) for i in range(len(said) - words + 1)]
        if runs:
            scores.append(-most * (1 - len(set(runs)) / len(runs)))
        else:
            scores.append(0.0)
    return scores


def _against_solutions(
    name: str, completions: Sequence[str], rows: Sequence[Row], agrees: Callable[[str, str], bool]
) -> list[float]:
    scores = []
    for text, row in zip(completions, rows, strict=True):
        truth = needed_solution(name, row)
        if isinstance(truth, list | tuple) and truth:  # several right answers: datasets give lists of one
            truth = truth[0]
        scores.append(float(agrees(text.strip(), str(truth).strip())))
    return scores


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    if found:
        return float(found[-1].replace(",", ""))
    return None
