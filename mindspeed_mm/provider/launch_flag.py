"""One row of the table of flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["int", "float", "word", "switch", "list"]


@dataclass(frozen=True)
class LaunchFlag:
    """One flag. Exactly one of `key`, `rule`, `of_loop`, `idle` and `refused` is given."""

    name: str
    """As scripts write it, without the dashes; `_` and `-` are the same."""
    kind: Kind
    default: Any = None
    """What Megatron takes where the flag is absent."""
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

    @property
    def dest(self) -> str:
        """Its name in the namespace."""
        return self.name.replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """How it may be written."""
        return tuple(dict.fromkeys((f"--{self.name}", f"--{self.dest}", f"--{self.name.replace('_', '-')}")))


def idle(reason: str, kind: Kind, names: str) -> tuple[LaunchFlag, ...]:
    """Rows of flags that are accepted and have no effect.

    Args:
        reason: Why.
        kind: Of all of them.
        names: Separated by spaces.
    """
    return tuple(LaunchFlag(name, kind, _absent(kind), idle=reason) for name in names.split())


def refused(reason: str, kind: Kind, names: str) -> tuple[LaunchFlag, ...]:
    """Rows of flags that are errors; see `idle`."""
    return tuple(LaunchFlag(name, kind, _absent(kind), refused=reason) for name in names.split())


def _absent(kind: Kind) -> bool | None:
    return False if kind == "switch" else None
