"""One row of the table of flags, `flags.toml`."""

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
