"""The flags of Megatron-style launch scripts, the rows of `flags.toml`: what each one is, what it does here, or why it
does nothing."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.suggest import nearest

# --- one row ----------------------------------------------------------------------------------------------------------

Kind = Literal["int", "float", "word", "switch", "list"]


@dataclass(frozen=True)
class LaunchFlag:
    """One flag. Exactly one of `key`, `rule`, `of_loop`, `idle` and `refused` is given."""

    name: str
    """As scripts write it, without the dashes; `_` and `-` are the same."""
    kind: Kind
    default: Any = None
    """What Megatron takes where the flag is absent; of a switch False."""
    key: str = ""
    """The configuration key that takes the value as it is."""
    rule: str = ""
    """The function of `flag_rules`, `size_rules` or `memory_rules` that reads it."""
    of_loop: str = ""
    """What `mindspeed_mm.training` does with it; it is no part of the configuration."""
    idle: str = ""
    """Why it is accepted and has no effect."""
    refused: str = ""
    """Why it is an error."""
    sets: str = ""
    """The configuration key that its rule sets first of all: messages that name the key can name the flag."""
    example: str = ""
    """A value that scripts give, where 2 or a word would not do."""

    def __post_init__(self) -> None:
        if self.kind == "switch":
            object.__setattr__(self, "default", False)

    @property
    def dest(self) -> str:
        """Its name in the namespace."""
        return self.name.replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """How it may be written."""
        return tuple(dict.fromkeys((f"--{self.name}", f"--{self.dest}", f"--{self.name.replace('_', '-')}")))


# --- the table --------------------------------------------------------------------------------------------------------


_LIKENESS = 0.75
"""Of a mistyped flag and a known one, at least: their names are long and share words."""


@cache
def flag_table() -> JsonObject:
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
    if found:
        return bare[found[0]]
    return ""
