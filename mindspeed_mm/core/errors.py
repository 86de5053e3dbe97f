"""Errors that a person can act on: what is wrong, where, the value found and the way out.

The command line prints them without a traceback and ends with the exit code of the error's class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")


class ExitCode(IntEnum):
    """Exit codes of every command."""

    OK = 0
    BUG = 1
    USAGE = 2
    ENVIRONMENT = 3
    DATA = 4
    DIVERGED = 5
    RESUMABLE = 75


@dataclass(frozen=True)
class Problem:
    """One finding, printed on one line."""

    what: str
    """What is wrong, with the value found, e.g. "'bf61' is not one of bf16, fp16, fp32"."""
    where: str = ""
    """The place: `file:line:column`, `rows.jsonl:12`, a folder."""
    key: str = ""
    """The configuration key or field name, dotted."""
    way_out: str = ""
    """The remedy, a full sentence: "Did you mean 'bf16'?"."""
    count: int = 1
    """How many findings the line stands for: more than one where it says how many others there are."""

    def __str__(self) -> str:
        sentence = self.what
        if self.way_out:
            sentence = f"{sentence.rstrip('.')}. {self.way_out}"
        return "  ".join(filter(None, (self.where, self.key, sentence)))


def first_problems(problems: Iterable[Problem], most: int = 5) -> list[Problem]:
    """The first of many problems, and how many more there are."""
    found = list(problems)
    if len(found) <= most:
        return found
    more = len(found) - most
    return [*found[:most], Problem(f"and {more:,} more", count=more)]


def first_names(names: Sequence[str], most: int = 5) -> str:
    """`a, b, c and 3 more`: the first of many names for a message."""
    shown = ", ".join(names[:most])
    if len(names) > most:
        return f"{shown} and {len(names) - most:,} more"
    return shown


class MMError(Exception):
    """An error with one or more problems. Subclasses fix the exit code.

    Args:
        what: What is wrong, or the headline when `problems` are given.
        where: File and line, folder, or sample.
        key: Dotted configuration key or field.
        way_out: What to do about it.
        problems: Several findings reported at once, instead of the single one above.
    """

    exit_code: ExitCode = ExitCode.BUG

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        key: str = "",
        way_out: str = "",
        problems: Sequence[Problem] = (),
    ) -> None:
        self.headline = ""
        self.problems: tuple[Problem, ...] = (Problem(what, where, key, way_out),)
        if problems:
            self.headline, self.problems = what, tuple(problems)
        super().__init__(str(self))

    def __str__(self) -> str:
        if not self.headline:
            return str(self.problems[0])
        return "\n".join([self.headline, *(f"  {line}" for line in align(self.problems))])

    def change_problems(self, change: Callable[[Problem], Problem]) -> None:
        """Tell each problem in other words; the error stays what it is."""
        self.problems = tuple(map(change, self.problems))
        self.args = (str(self),)

    def retell(self, headline: str, problems: Sequence[Problem]) -> None:
        """Tell these problems under a headline; the error stays what it is."""
        self.headline, self.problems = headline, tuple(problems)
        self.args = (str(self),)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by attributes: errors cross process borders (data workers, spawned ranks)."""
        return (_rebuild, (type(self), self.headline, self.problems))


def _rebuild(cls: type[MMError], headline: str, problems: tuple[Problem, ...]) -> MMError:
    # without __init__: subclasses may take other arguments
    error = cls.__new__(cls)
    error.headline, error.problems = headline, problems
    Exception.__init__(error, str(error))
    return error


@contextmanager
def told_as(change: Callable[[Problem], Problem]) -> Iterator[None]:
    """Errors that pass through here tell their problems in other words."""
    try:
        yield
    except MMError as error:
        error.change_problems(change)
        raise


class CollectedErrors:
    """Errors of steps that do not need one another, so that a person sees all of them at once."""

    def __init__(self) -> None:
        self.errors: list[MMError] = []

    def attempt(self, step: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result | None:
        """What a step returns; None where it raised an `MMError`, which is kept."""
        try:
            return step(*args, **kwargs)
        except MMError as error:
            self.errors.append(error)
            return None

    def raise_all(self, headline: str) -> None:
        """Raise what was kept, if anything was: one error as it is, several as one with all their problems and the
        exit code of the first."""
        if not self.errors:
            return
        first = self.errors[0]
        if len(self.errors) == 1:
            raise first
        # a dict keeps the order and drops what two steps have found alike
        problems = dict.fromkeys(problem for error in self.errors for problem in error.problems)
        raise type(first)(headline, problems=list(problems)) from first


def count_problems(where: object, problems: Sequence[Problem]) -> str:
    """The headline over the problems of a file: `run.yaml: 2 problems`; those that are only counted are counted in."""
    number = sum(problem.count for problem in problems)
    if number == 1:
        return f"{where}: 1 problem"
    return f"{where}: {number:,} problems"


def align(problems: Sequence[Problem]) -> list[str]:
    """Lines with places and keys in columns, so that they read as a table."""
    place_width = max(len(p.where) for p in problems)
    key_width = max(len(p.key) for p in problems)
    lines = []
    for p in problems:
        sentence = str(Problem(p.what, way_out=p.way_out))
        columns = []
        if place_width:
            columns.append(p.where.ljust(place_width))
        if key_width:
            columns.append(p.key.ljust(key_width))
        lines.append("  ".join([*columns, sentence]))
    return lines


class UsageError(MMError):
    """The command line is off."""

    exit_code = ExitCode.USAGE


class ConfigError(MMError):
    """The configuration is wrong: a key, a value, or several that do not go together."""

    exit_code = ExitCode.USAGE


class MachineError(MMError):
    """The machine, a library or the process environment is off."""

    exit_code = ExitCode.ENVIRONMENT


class DataError(MMError):
    """A dataset, a row or a media file is off."""

    exit_code = ExitCode.DATA


class ModelFolderError(MMError):
    """A model folder or its weights are off."""

    exit_code = ExitCode.DATA


class CheckpointError(MMError):
    """A checkpoint is off, or could not be written."""

    exit_code = ExitCode.DATA


class DivergedError(MMError):
    """Training was stopped by a guard."""

    exit_code = ExitCode.DIVERGED


class StoppedAfterSave(MMError):
    """Training was asked to stop and saved a checkpoint: run the same command again to continue."""

    exit_code = ExitCode.RESUMABLE


class StoppedUnsaved(MMError):
    """Training was asked to stop and there was nowhere to save."""

    exit_code = ExitCode.DIVERGED
