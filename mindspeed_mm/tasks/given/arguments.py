"""Arguments of the Python door: what they may be, and how those are refused that are something else."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from mindspeed_mm.core.errors import Problem, UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.request import short
from mindspeed_mm.core.suggest import did_you_mean

_BASIC = "data.dataset_param.basic_parameters"
_ROWS = {"rows": f"{_BASIC}.dataset", "val_rows": f"{_BASIC}.val_dataset"}
_RESUMES = {"auto": True, "never": False}


def check_flags(**flags: object) -> None:
    """Raise `UsageError` for one that is neither True nor False: any text that is not empty would count as true."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise UsageError(
                f"{short(flag)} is neither True nor False", key=name, way_out=f"Pass {name}=True or {name}=False."
            )


def check_counts(least: int = 1, **counts: object) -> None:
    """Raise `UsageError` for a number that is not a whole one, or below `least`; None is none."""
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < least):
            raise UsageError(f"{short(count)} is not a whole number of at least {least}", key=name)


def wants_resume(resume: object) -> bool:
    """Whether a run continues: True or False, or the command line's words for them.

    Raises:
        UsageError: It is something else.
    """
    if isinstance(resume, bool):
        return resume
    if not isinstance(resume, str) or resume not in _RESUMES:
        raise UsageError(
            f"{short(resume)} is not one of True, False, 'auto' and 'never'",
            key="resume",
            way_out="Pass resume=True to continue a run, resume=False to refuse a folder that has one.",
        )
    return _RESUMES[resume]


def given_sections(**sections: object) -> JsonObject:
    """The sections that were given.

    Raises:
        UsageError: One is not a mapping.
    """
    found: JsonObject = {}
    for name, values in sections.items():
        if values is not None and not isinstance(values, Mapping):
            raise UsageError(
                f"{short(values)} is not a section",
                key=name,
                way_out=f"A section is a mapping of its keys: {name}={{…}}.",
            )
        if values is not None:
            found[name] = values
    return found


def refuse_unknown(
    unknown: Mapping[str, object],
    function: Callable[..., object],
    what: str = "is not an argument",
    also: Iterable[str] = (),
) -> None:
    """Raise `UsageError` for an argument that a function does not have: with the one that was probably meant, or the
    section of the configuration that has a key of this name; `also` are names that its `**` takes."""
    from mindspeed_mm.fsdp.params.argument import Arguments  # pydantic

    parameters = inspect.signature(function).parameters.values()
    known = [*(one.name for one in parameters if one.kind is not one.VAR_KEYWORD), *also]
    for name, value in unknown.items():
        homes = [
            section
            for section, field in Arguments.model_fields.items()
            if "training" in known and name in getattr(field.annotation, "model_fields", {})
        ]
        way_out = f"{did_you_mean(name, known)}See help(mm.{function.__name__})."
        if homes:
            way_out = f"Put it into its section: {homes[0]}={{{name!r}: {short(value)}}}."
        raise UsageError(what, key=name, way_out=way_out)


def named_by(**rows: object) -> Callable[[Problem], Problem]:
    """Problems of the keys that name rows are problems of the arguments that named them instead."""
    paths = {_ROWS[name]: name for name, given in rows.items() if isinstance(given, str | os.PathLike)}

    def change(problem: Problem) -> Problem:
        return replace(problem, key=paths.get(problem.key, problem.key))

    return change
