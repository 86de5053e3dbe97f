"""Scripts that have flags of their own: their parsers, made of `entries` in `flags.toml`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.provider.flags import flag_table

_TYPES = {"path": Path, "int": int, "float": float}


@dataclass(frozen=True)
class EntryFlags:
    """The parser of a script's flags, and those that it does not know as options."""

    parser: argparse.ArgumentParser
    idle: Mapping[str, str]
    """Flag that does nothing, with its dashes → why."""
    idle_switches: frozenset[str]
    """Those of them that take no value."""
    refused: Mapping[str, str]
    """Flag that is an error, with its dashes → why."""

    def rest(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Words for the YAML, and notes on flags that do nothing, of what the parser did not take.

        Raises:
            UsageError: A word is none of these.
        """
        overrides: list[str] = []
        notes: list[str] = []
        has_value = False
        for word in words:
            flag, sign, _ = word.partition("=")
            if flag in self.idle:
                notes.append(f"{flag} has no effect: {self.idle[flag]}")
                # the next word is the value of a flag that does nothing
                has_value = not sign and flag not in self.idle_switches
            elif flag.startswith("--"):
                raise UsageError("no such flag", key=flag, way_out="See --help.")
            elif has_value:
                has_value = False
            elif sign and "." in flag:
                overrides.append(word)
            else:
                raise UsageError(f"'{word}' belongs to no flag", way_out="See --help.")
        return overrides, notes


class _EntryParser(argparse.ArgumentParser):
    """Says what is wrong as every command here does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, way_out="See --help.")


def entry_flags(script: str, **meanings: Mapping[str, object]) -> EntryFlags:
    """The flags of a script, with its defaults.

    Args:
        script: Its name without `.py`.
        meanings: Flag → what each value that it may have means to the caller.
    """
    entry = flag_table()["entries"][script]
    # no abbreviations: a mistyped flag would set another one
    parser = _EntryParser(f"{script}.py", description=entry["description"], allow_abbrev=False)
    for name, row in entry["flags"].items():
        options = dict(row)
        kind = options.pop("type", "word")
        if kind == "switch":
            options["action"] = "store_true"
        elif kind != "word":
            options["type"] = _TYPES[kind]
        if kind == "path" and "default" in options:
            options["default"] = Path(options["default"])
        if name in meanings:
            options["choices"] = list(meanings[name])
        parser.add_argument(f"--{name}", **options)
    idle = {f"--{name}": reason for reason, names in entry["idle"].items() for name in names}
    switches = frozenset(f"--{name}" for name in entry.get("idle_switches", ()))
    return EntryFlags(parser, idle, switches, {f"--{name}": why for name, why in entry.get("refused", {}).items()})
