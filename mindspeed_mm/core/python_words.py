"""Errors as a caller in Python reads them. They are written for the command line, once; at the border to Python its
options become arguments, and its verbs functions."""

from __future__ import annotations

import re
from dataclasses import replace

from mindspeed_mm.core.errors import MMError, Problem

FLAGS = (
    "accept-data-change", "allow-fresh", "ignore-case", "ignore-punctuation", "loss", "merge", "overwrite",
    "single-file", "transformer-only", "weights-only",
)  # fmt: skip
"""Options without a value."""
ARGUMENTS = {
    **{name: name.replace("-", "_") for name in FLAGS},
    "batch-size": "batch_size",
    "lora-format": "lora_format",
    "max-new-tokens": "max_new_tokens",
    **{name: name for name in ("config", "dtype", "lora", "metric")},
    **{name: name for name in ("out", "prompt", "resume", "step", "steps", "weights")},
    "data": "rows",
    "image": "images",
    "media-dir": "rows",
    "model": "model_folder",
    "size": "height, width",
}
"""Option → the argument that stands for it; others are left as they are."""
VERBS = ("train", "check", "infer", "evaluate", "export")

_CLAUSES = re.compile(r"(?<=[.;:,]) ")
_OPTION = re.compile(r"(?<![\w.-])--([a-z][a-z-]*[a-z])( auto\b| [A-Z]{3,}\b)?")
_COMMAND = re.compile(r"\bmm ([a-z]+)\b")
_PLACE = re.compile(r"--([a-z-]+):\d+")
_ROW = re.compile(r"(?:.*/)?(question|train|validation)s?-[0-9a-f]{12}\.jsonl:(\d+)")
"""A row of a file that rows in memory were written to."""


def word_for_python(error: MMError) -> None:
    """Change an error in place: the same problems, with the words of the Python door."""
    error.headline = _sentence(error.headline)
    error.change_problems(problem_for_python)


def problem_for_python(problem: Problem) -> Problem:
    """The same problem in the words of the Python door."""
    key = problem.key
    if named := _OPTION.fullmatch(key):
        key = ARGUMENTS.get(named[1], key)
    return replace(
        problem,
        what=_sentence(problem.what),
        where=_python_place(problem.where),
        key=key,
        way_out=_sentence(problem.way_out),
    )


def _python_place(where: str) -> str:
    """`--prompt:1` → `prompt`; a row that was in memory is told by its number."""
    prompt = _PLACE.fullmatch(where)
    if prompt is not None:
        return ARGUMENTS.get(prompt[1], where)
    # lines of a file count from 1, rows of a list from 0
    return _ROW.sub(lambda found: f"{found[1]} rows, row {int(found[2]) - 1}", where)


def _sentence(text: str) -> str:
    """Clause by clause: one that names a command which is not a function here stays a command of the shell."""
    if "--" not in text and "mm " not in text:
        return text
    return " ".join(map(_clause, _CLAUSES.split(text)))


def _clause(text: str) -> str:
    if any(verb not in VERBS for verb in _COMMAND.findall(text)):
        return text
    return _OPTION.sub(_argument, _COMMAND.sub(r"mm.\1", text))


def _argument(option: re.Match[str]) -> str:
    name, value = option.groups()
    if name not in ARGUMENTS:
        return option[0]
    if name in FLAGS or value == " auto":
        return f"{ARGUMENTS[name]}=True" + (value or "").removesuffix(" auto")
    if value is None:
        return ARGUMENTS[name]
    return f"{ARGUMENTS[name]}={value.strip()}"
