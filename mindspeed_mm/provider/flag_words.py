"""Errors in the words of a command line of flags: keys of the configuration by the flags that set them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from mindspeed_mm.core.errors import MMError, Problem
from mindspeed_mm.provider.flags import FLAGS

_SECTIONS = "model|data|parallel|training|features|tools|inference|posttrain"
_SETTING = re.compile(rf"\b((?:{_SECTIONS})(?:\.\w+)+)=(<[^>]*>|\[[^\]]*\]|[^\s,;:]*[^\s,;:.])")
"""`training.save=<new folder>`, as messages say what to add to a command."""
_WORD = re.compile(rf"(?<![\w.=/-])(?:(?:{_SECTIONS})(?:\.\w+)+|[a-z0-9]+(?:_[a-z0-9]+)+)\b(?![.\w]*=)")
"""A key, whole or its last part where that is no everyday word."""
_SET = "--mm-set"
_OF_FILE = "data.dataset_param.basic_parameters.dataset"
"""A key that data.json says as a rule, under the same name; --data-path is a flag of a few scripts."""


@contextmanager
def told_in_flags() -> Iterator[None]:
    """Errors that pass through here name flags in place of keys, and say what can be added to this command line."""
    try:
        yield
    except MMError as error:
        error.retell(in_flags(error.headline), [_in_flags(problem) for problem in error.problems])
        raise


_SAME_BATCH = re.compile(r"Add (?:training\.(?:gradient_accumulation_steps|micro_batch_size)=\d+ ?)+\.")
"""The ways to another run's global batch by keys of a YAML; launch scripts have a flag for the batch itself."""


def in_flags(text: str) -> str:
    """A text with flags in place of the keys that they set, and `--mm-set` before settings that no flag has."""
    text = _SAME_BATCH.sub("Choose --global-batch-size as it was.", text)
    text = _SETTING.sub(lambda found: _setting(found[1], found[2]), text)
    return _WORD.sub(lambda found: flag_of_key().get(found[0], found[0]), text)


@cache
def flag_of_key() -> dict[str, str]:
    """Key → the flag that sets it; the key's last part too, where it is no everyday word and means one key alone, and
    is none that data.json says."""
    found: dict[str, str] = {}
    for flag in FLAGS:
        for key in (flag.key, flag.sets):
            if key and key != _OF_FILE:
                found.setdefault(key, f"--{flag.name}")
    last_parts = Counter(key.rpartition(".")[2] for key in found)
    short = {}
    for key, name in found.items():
        last = key.rpartition(".")[2]
        if "_" in last and last_parts[last] == 1 and not key.startswith("data."):
            short[last] = name
    return short | found


def _setting(key: str, value: str) -> str:
    flag = flag_of_key().get(key)
    if flag:
        return f"{flag} {value}"
    return f"{_SET} {key}={value}"


def _in_flags(problem: Problem) -> Problem:
    key = " · ".join(flag_of_key().get(each, each) for each in problem.key.split(" · "))
    if problem.where.startswith("--") and key.startswith("--"):
        key = ""  # the flag that was given says it
    way_out = in_flags(problem.way_out)
    keys = re.findall(rf"(?<![\w.])(?:{_SECTIONS})\.\w[\w.]*\w", way_out)
    if keys and _SET not in way_out:
        way_out = f"{way_out} (Here: {_SET} {keys[0]}=….)"
    return Problem(in_flags(problem.what), problem.where, key, way_out)
