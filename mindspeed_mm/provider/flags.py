"""The flags of Megatron-style launch scripts: what each one is, what it does here, or why it does nothing."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from mindspeed_mm.core.suggest import nearest
from mindspeed_mm.provider.launch_flag import LaunchFlag

_LIKENESS = 0.75
"""Of a mistyped flag and a known one, at least: their names are long and share words."""


@cache
def flag_table() -> dict[str, Any]:
    """`flags.toml`, which begins with what its sections mean."""
    return tomllib.loads(Path(__file__).with_name("flags.toml").read_text(encoding="utf-8"))


def _launch_flags() -> tuple[LaunchFlag, ...]:
    table = flag_table()
    flags = [LaunchFlag(name, **row) for section in table["read"].values() for name, row in section.items()]
    for effect in ("idle", "refused"):
        for group in table[effect]:
            kinds = {**group}
            why = {effect: kinds.pop("reason")}
            flags += [LaunchFlag(name, kind, **why) for kind, names in kinds.items() for name in names]
    return tuple(flags)


FLAGS = _launch_flags()
"""Every flag, in the order in which documents group them."""


@cache
def by_dest() -> dict[str, LaunchFlag]:
    """Name in the namespace → flag."""
    return {flag.dest: flag for flag in FLAGS}


@cache
def by_spelling() -> dict[str, LaunchFlag]:
    """How a flag may be written → flag."""
    found: dict[str, LaunchFlag] = {}
    for flag in FLAGS:
        found |= dict.fromkeys(flag.spellings, flag)
    return found


def nearest_flag(name: str, known: Iterable[str]) -> str:
    """The flag that was probably meant by a mistyped one; empty where none is near. Names are compared without their
    dashes, which make all flags alike, and none is offered that would be an error itself.

    Args:
        name: With its dashes or without.
        known: Spellings, with their dashes.
    """
    rows = by_spelling()
    bare: dict[str, str] = {}
    for other in known:
        if other not in rows or not rows[other].refused:
            bare[other.lstrip("-")] = other
    found = nearest(name.lstrip("-"), bare, likeness=_LIKENESS)
    return bare[found[0]] if found else ""
