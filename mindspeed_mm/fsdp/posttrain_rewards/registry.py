"""The registry of rewards, and how they are called.

A reward is a function of prompts, completions and rows, or a class whose instances are such functions, for what is
loaded once:

    @reward_register.register("short")
    def short(prompts, completions, rows, *, most=80):
        return [float(len(completion) <= most) for completion in completions]

It is given this rank's own samples in one call and returns a number for each, None where it cannot judge. Completions
are texts, or PIL pictures (a list of them for a clip) where a generator is trained. A reward that names
`completion_ids` is given the token ids of texts, too. `settings` in the YAML are its own keywords. An instance that
asks a server may have `check_server`, which `mm check` and the start of training call.

A reward that names `completions` and no `rows` is called as TRL calls its own: by keyword, each column of the rows as a
list, of those that it names or, where it has `**kwargs`, of all.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch

from mindspeed_mm.core.errors import ConfigError, DataError, MMError, Problem, told_as
from mindspeed_mm.fsdp.utils.register import Registry

Row = Mapping[str, Any]
"""All columns of a data row; `solution` where there is one."""

KEY = "posttrain.rewards"
"""Of the section. An error of a reward under this key is told under the key of that reward's entry."""
MOST_REWARD = 1e9
"""Largest reward, of either sign: with larger ones the standard deviation of a group loses the other rewards."""
_ROOM = "mindspeed_mm.fsdp.posttrain_rewards"
_BUILT_IN = {
    "texts": {
        **dict.fromkeys(("exact_match", "contains", "regex", "number", "think_format", "json"), f"{_ROOM}.rules"),
        **dict.fromkeys(("length", "repetition"), f"{_ROOM}.rules"),
    },
    "pictures": {
        "jpeg_size": f"{_ROOM}.pictures",
        **dict.fromkeys(("clip_score", "hps_v2", "pickscore"), f"{_ROOM}.clip"),
        "videoalign": f"{_ROOM}.videoalign",
    },
    "both": {"http": f"{_ROOM}.http", "vlm_judge": f"{_ROOM}.vlm_judge"},
}
"""What they judge → name → module."""
COMPARING = frozenset({"exact_match", "contains", "number"})
"""Rewards that need a solution in each row."""

reward_register = Registry(KEY, builtin=lambda: _BUILT_IN["texts"] | _BUILT_IN["pictures"] | _BUILT_IN["both"])

SOLUTION_COLUMNS = ("solution", "answer", "ground_truth")
"""Where rows keep the right answer; verl's rows keep it in `reward_model.ground_truth`."""


@dataclass(frozen=True)
class Judged:
    """What is to be judged."""

    prompts: Sequence[str]
    completions: Sequence[Any]
    """Texts, or PIL pictures."""
    rows: Sequence[Row]
    completion_ids: Sequence[Sequence[int]] = ()
    """Token ids of texts."""
    ids: Sequence[str] = ()
    """Names of the samples, for messages."""


Judge = Callable[..., Sequence[float | None]]
"""(prompts, completions, rows, …) → a number for each, None where it cannot judge."""


@runtime_checkable
class AsksServer(Protocol):
    """A judge that needs a server."""

    def check_server(self) -> None:
        """Raise `MachineError` where the server is not there, and is needed."""
        ...


@dataclass(frozen=True)
class Reward:
    """A reward that is ready to judge."""

    name: str
    weight: float
    judge: Judge
    extra: frozenset[str] = field(default_factory=frozenset)
    """Further arguments that it takes."""
    key: str = KEY
    """Of its entry."""

    def check_server(self) -> None:
        """Raise `MachineError` where it needs a server that is not there."""
        if isinstance(self.judge, AsksServer):
            with told_under(self.key):
                self.judge.check_server()

    def __call__(self, judged: Judged) -> list[float]:
        """One number a sample; not a number where the reward does not judge it.

        Raises:
            DataError: It failed, or returned something else.
        """
        with told_under(self.key):
            return self._checked(self._judged(judged), judged)

    def _judged(self, judged: Judged) -> object:
        given: tuple[Sequence[Any], ...] = (judged.prompts, judged.completions, judged.rows)
        named: dict[str, Sequence[Any]] = {name: getattr(judged, name) for name in self.extra}
        if _takes_columns(self.judge):
            given, named = (), self._columns(judged)
        try:
            return self.judge(*given, **named)
        except (MMError, MemoryError, torch.OutOfMemoryError):  # the run tells what took the memory
            raise
        except Exception as error:  # of a function of the user's, or of settings that it cannot work with
            way_out = f"It was given {self._given(judged)}; repair it, or its settings."
            raise self._wrong(f"failed: {_with_place(error)}", way_out) from error

    def _columns(self, judged: Judged) -> dict[str, Sequence[Any]]:
        """What is judged and columns of the rows, under the names that a judge has for them."""
        judge, found = self.judge, dict[str, Sequence[Any]]()
        for row in judged.rows:
            for name in row.keys() - found.keys():
                found[name] = [each.get(name) for each in judged.rows]
        own = sorted(found)
        found |= {"prompts": judged.prompts, "completions": judged.completions, "completion_ids": judged.completion_ids}
        settings = judge.keywords.keys() if isinstance(judge, partial) else ()
        named, takes_all = _keywords(judge), _takes_any_keyword(judge)
        # Settings are bound already: a column of that name may not take their place.
        columns = {name: each for name, each in found.items() if name not in settings and (takes_all or name in named)}
        if missing := [name for name in _needed(judge) if name not in columns]:
            raise self._wrong(
                f"needs {', '.join(missing)}, which the rows do not have",
                f"They have {', '.join(own) or 'no columns'}; a reward that names rows is given whole rows.",
            )
        return columns

    @staticmethod
    def _given(judged: Judged) -> str:
        kinds = sorted({type(completion).__name__ for completion in judged.completions})
        return f"{len(judged.completions)} completions ({', '.join(kinds)})"

    def _checked(self, scores: object, judged: Judged) -> list[float]:
        if isinstance(scores, torch.Tensor | np.ndarray):
            scores = scores.tolist()
        expected = len(judged.completions)
        if not isinstance(scores, Sequence) or isinstance(scores, str) or len(scores) != expected:
            got = f"{len(scores)} values" if isinstance(scores, Sequence) else type(scores).__name__
            raise self._wrong(f"returned {got} for {expected} completions", "Return one number or None for each.")
        found: list[float] = []
        for number, score in enumerate(scores):
            if score is None:
                found.append(math.nan)
            elif isinstance(score, Real) and abs(_as_float(score)) <= MOST_REWARD:  # NaN is not
                found.append(float(score))
            else:
                where = judged.ids[number] if number < len(judged.ids) else f"completion {number}"
                way_out = f"Return a number up to ±{MOST_REWARD:g}, or None."
                raise self._wrong(f"returned {score!r} for {where}", way_out)
        return found

    def _wrong(self, what: str, way_out: str) -> DataError:
        return DataError(f"the reward '{self.name}' {what}", key=KEY, way_out=way_out)


def _with_place(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


def _as_float(score: Real) -> float:
    try:
        return float(score)
    except OverflowError:
        return math.inf


def told_under(key: str) -> AbstractContextManager[None]:
    """Errors that pass through here are told under the key of the entry that they are about."""

    def change(problem: Problem) -> Problem:
        if problem.key == KEY or problem.key.startswith(f"{KEY}."):
            return replace(problem, key=key + problem.key.removeprefix(KEY))
        return problem

    return told_as(change)


def build_reward(
    name: str, weight: float = 1.0, options: Mapping[str, object] | None = None, *, key: str = KEY
) -> Reward:
    """The reward of this name.

    Args:
        name: As registered.
        weight: In the sum.
        options: Its own keywords.
        key: Of its entry, under which it tells errors.

    Raises:
        ConfigError: There is none, or it does not take these keywords or their values.
    """
    made, options = reward_register.get(name), dict(options or {})
    _check_options(name, made, options)
    try:
        judge: Judge = made(**options) if isinstance(made, type) else partial(made, **options)
    except (MMError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of a class of the user's, or of settings that it cannot work with
        what, way_out = f"the reward '{name}' cannot be built: {_with_place(error)}", "Repair it, or its settings."
        raise ConfigError(what, key=KEY, way_out=way_out) from error
    _check_call(name, judge)
    return Reward(name, weight, judge, _extra_of(judge), key)


def check_judges(name: str, completions: Literal["texts", "pictures"]) -> None:
    """Raise `ConfigError` for a built-in reward of texts where pictures are judged, and the reverse."""
    others = _BUILT_IN["pictures" if completions == "texts" else "texts"]
    if name in others:
        raise ConfigError(
            f"the reward '{name}' does not judge {completions}, which this model makes",
            key=KEY,
            way_out=f"Such rewards are {', '.join(sorted({**_BUILT_IN[completions], **_BUILT_IN['both']}))}.",
        )


def check_solutions(names: Iterable[str], rows: Sequence[Row]) -> None:
    """Raise `DataError` for a row without a solution where one of these rewards compares with it."""
    for name in COMPARING.intersection(names):
        for row in rows:
            needed_solution(name, row)


def takes_setting(name: str, setting: str) -> bool:
    """Whether a reward has a setting of this name.

    Raises:
        ConfigError: There is no such reward.
    """
    return setting in _keywords(reward_register.get(name))


def _check_options(name: str, made: Callable[..., object], options: Mapping[str, object]) -> None:
    signature, given = inspect.signature(made), dict(options)
    judged: tuple[None, ...] = ()
    if not inspect.isclass(made):  # a function gets what is judged in the same call
        if _takes_columns(made):
            given = dict.fromkeys(_needed(made)) | given
            # `**kwargs` are columns: a setting has a name of its own.
            signature = signature.replace(
                parameters=[each for each in _parameters(made) if each.kind != each.VAR_KEYWORD]
            )
        else:
            judged, given = (None,) * 3, dict.fromkeys(_extra_of(made)) | given
    try:
        signature.bind(*judged, **given)
    except TypeError as error:
        taken = [each for each in _keywords(made) if each not in ("prompts", "completions", "rows", "completion_ids")]
        way_out = f"It takes {', '.join(taken) or 'no keywords'} beside name and weight."
        if judged and "completions" not in _keywords(made):
            way_out = _CALLED
        raise ConfigError(f"the reward '{name}' cannot be built: {error}", key=KEY, way_out=way_out) from error


def _check_call(name: str, judge: Judge) -> None:
    """Raise `ConfigError` for an instance that cannot be called with what is judged."""
    if _takes_columns(judge):
        return
    try:
        inspect.signature(judge).bind(None, None, None, **dict.fromkeys(_extra_of(judge)))
    except TypeError as error:
        raise ConfigError(f"the reward '{name}' cannot be called: {error}", key=KEY, way_out=_CALLED) from error


_CALLED = "A reward takes (prompts, completions, rows), or (prompts, completions, **columns) as TRL's do."


def _parameters(made: Callable[..., object]) -> list[inspect.Parameter]:
    return [each for name, each in inspect.signature(made).parameters.items() if name != "self"]


def _keywords(made: Callable[..., object]) -> list[str]:
    return [each.name for each in _parameters(made) if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]


def _needed(judge: Callable[..., object]) -> list[str]:
    """Return the names of parameters without a default; `*args` and `**kwargs` do not count."""
    named = set(_keywords(judge))
    return [each.name for each in _parameters(judge) if each.name in named and each.default is each.empty]


def _takes_any_keyword(judge: Callable[..., object]) -> bool:
    return any(each.kind == each.VAR_KEYWORD for each in _parameters(judge))


def _takes_columns(judge: Callable[..., object]) -> bool:
    """Whether it is called as TRL calls rewards."""
    named = _keywords(judge)
    return "completions" in named and "rows" not in named


def _extra_of(judge: Callable[..., object]) -> frozenset[str]:
    return frozenset({"completion_ids", "ids"} & set(_keywords(judge)))


def names_and_weights(rewards: Iterable[Reward]) -> tuple[list[str], torch.Tensor]:
    """Of each reward; the weights are fp64."""
    names, weights = [], []
    for reward in rewards:
        names.append(reward.name)
        weights.append(reward.weight)
    return names, torch.tensor(weights, dtype=torch.float64)


def scores_of(rewards: Sequence[Reward], judged: Judged) -> torch.Tensor:
    """(samples, rewards) fp64; not a number where a reward does not judge a sample."""
    columns = [torch.tensor(reward(judged), dtype=torch.float64) for reward in rewards]
    return torch.stack(columns, dim=1)


def check_judged(scores_AR: torch.Tensor, names: Sequence[str]) -> None:
    """Raise `DataError` when nobody judged anything; the scores are those of all ranks."""
    if scores_AR.numel() and bool(scores_AR.isnan().all()):
        raise DataError(
            f"no reward judged any answer of the step: {', '.join(names)} returned null",
            key=KEY,
            way_out="Check what they are given with mm posttrain score, or add a reward that judges all rows.",
        )


def solution_of(row: Row) -> Any:
    """The right answer that a row has; None where it has none."""
    for name in SOLUTION_COLUMNS:
        if row.get(name) is not None:
            return row[name]
    of_verl = row.get("reward_model")
    if isinstance(of_verl, Mapping):
        return of_verl.get("ground_truth")
    return None


def needed_solution(name: str, row: Row) -> Any:
    """The right answer that a row has, for the reward of this name.

    Raises:
        DataError: The row has none.
    """
    truth = solution_of(row)
    if truth is None:
        raise DataError(
            f"the row has no solution, which the reward '{name}' compares with",
            where=str(row.get("id", "")),
            key="solution",
            way_out="Give the row a last turn of the model, or a column solution, answer or ground_truth; or take "
            "rewards that compare with nothing.",
        )
    return truth
