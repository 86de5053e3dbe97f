"""From the words of a command line, or from one YAML that replaces them, to a namespace: every flag of the table by
name, with Megatron's defaults, and a note of which ones were given.

In the YAML `gpt_args` and `lora_args` are flags, `data` and `model` replace the JSON files.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from mindspeed_mm.core.errors import ConfigError, Problem, UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.params.value_types import show
from mindspeed_mm.fsdp.params.yaml.config_text import read_config_text
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.fsdp.params.yaml.tree import Node, SourcePosition, plain
from mindspeed_mm.provider.flags import FLAGS, by_dest, by_spelling, nearest_flag
from mindspeed_mm.provider.json_tree import entries_of

ExtraArgsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]
"""A user's function that adds flags of its own to the parser."""

_ORIGIN = "mm_given"
"""The attribute of a namespace that says where its values come from."""
_NUMBERS: dict[str, tuple[type, str]] = {"int": (int, "a whole number"), "float": (float, "a number")}


@dataclass
class GivenFlags:
    """Where the values of a namespace come from."""

    places: dict[str, SourcePosition] = field(default_factory=dict)
    """Name of each flag that was given → the flag, or its line in a file."""
    sections: Mapping[str, Node] = field(default_factory=dict)
    """`data`, `model` and `tools`, where one YAML holds them together with the flags."""
    world_size: int | None = None
    """Number of ranks; None where nobody says."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        name, _, rest = message.removeprefix("argument ").partition(": ")
        if not message.startswith("argument ") or not rest:
            raise UsageError(message)
        what = "needs a value" if rest.startswith(("expected one", "expected at least one")) else rest
        raise UsageError(what, where=name.split("/")[0])


def parse(
    words: Sequence[str],
    environment: Mapping[str, str],
    extra_args_provider: ExtraArgsProvider | None = None,
    ignore_unknown: bool = False,
) -> Namespace:
    """The namespace of a command line.

    Args:
        words: What stands behind the entry's name: flags; or one YAML with `gpt_args`, and flags that win over it.
        environment: `WORLD_SIZE`, `RANK` and `LOCAL_RANK` of the process, as torchrun sets them.
        extra_args_provider: Adds a user's own flags.
        ignore_unknown: Leave out what no flag of the table or of the user stands for.

    Raises:
        UsageError: Every word that cannot be read.
        ConfigError: The one YAML cannot be read.
    """
    file, flags = OneYaml(), list(words)
    if words and words[0].endswith((".yaml", ".yml")):
        file, flags = _read_one_yaml(Path(words[0])), flags[1:]
    parser = build_parser() if extra_args_provider is not None else _usual_parser()
    ours = dict(parser._option_string_actions)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser) or parser
    known, left = parser.parse_known_args([*file.words, *flags])
    given = GivenFlags({**file.places, **_given(flags)}, file.sections)
    for name, action in ours.items():
        row = by_spelling().get(name)
        if row is not None and (row.idle or row.refused) and parser._option_string_actions.get(name) is not action:
            given.places.pop(row.dest, None)  # a user's own flag that has the name of one that would say nothing here
    problems = [] if ignore_unknown else _unknown(left, flags, _spellings(parser))
    problems += _convert(known, given)
    if problems:
        raise UsageError(f"{count_of(problems)} in the flags", problems=problems)
    values = vars(known)
    for flag in FLAGS:
        if values.get(flag.dest) is None:
            values[flag.dest] = flag.default
    given.world_size = _world_size(known, given, environment)
    known.world_size = given.world_size or 1
    known.rank = _number(environment, "RANK", 0)
    known.local_rank = _number(environment, "LOCAL_RANK", 0)
    setattr(known, _ORIGIN, given)
    return known


def build_parser() -> argparse.ArgumentParser:
    """A parser of every flag of the table; a user's flag of the same name takes its place."""
    parser = _Parser(description="Megatron-style flags.", allow_abbrev=False, conflict_handler="resolve")
    for flag in FLAGS:
        action: JsonObject = {"switch": {"action": "store_true"}, "list": {"nargs": "+"}}.get(flag.kind, {})
        text = flag.key or flag.of_loop or (flag.idle and f"no effect: {flag.idle}") or flag.refused or flag.rule
        parser.add_argument(
            *flag.spellings, dest=flag.dest, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **action
        )
    return parser


@cache
def _usual_parser() -> argparse.ArgumentParser:
    """The parser where nobody adds flags: to build one of six hundred flags takes longer than to parse."""
    return build_parser()


def given_of(namespace: Namespace) -> GivenFlags:
    """Where the values of a namespace come from; one that was made by hand counts as given in Python."""
    values = vars(namespace)
    given = values.get(_ORIGIN)
    if isinstance(given, GivenFlags):
        return given
    known = by_dest()
    places = {}
    for name, value in values.items():
        if name in known and value is not None:
            places[name] = SourcePosition(f"args.{name}")
    return GivenFlags(places, world_size=None)


def fill_absent(namespace: Namespace, defaults: Mapping[str, object]) -> None:
    """Give flags that are absent a program's own defaults, as `pretrain(args_defaults=…)` asks.

    Args:
        namespace: As `parse` returns it; changed in place.
        defaults: Name of a flag → value.
    """
    places = given_of(namespace).places
    for name, value in defaults.items():
        if name not in places:
            setattr(namespace, name, value)
            places[name] = SourcePosition(f"args_defaults['{name}']")


def _given(words: Sequence[str]) -> dict[str, SourcePosition]:
    places = {}
    for word in words:
        flag = by_spelling().get(word.partition("=")[0])
        if flag is not None and word.startswith("--"):
            places[flag.dest] = SourcePosition(f"--{flag.name}")
    return places


def _spellings(parser: argparse.ArgumentParser) -> list[str]:
    return [name for name in parser._option_string_actions if name.startswith("--")]


def _unknown(left: Sequence[str], words: Sequence[str], known: Sequence[str]) -> list[Problem]:
    """Words that belong to no flag; what follows an unknown flag belongs to it."""
    problems, owned, owner = [], [], ""
    for word in words:
        if word.startswith("--"):
            owner = word.split("=", 1)[0]
        elif owner and owner not in known:
            owned.append(word)
    for word in left:
        if word.startswith("--"):
            name = word.split("=", 1)[0]
            meant = nearest_flag(name, known)
            problems.append(Problem("unknown flag", name, way_out=f"Did you mean '{meant}'?" if meant else ""))
        elif word in owned:
            owned.remove(word)
        else:
            problems.append(Problem(f"'{word}' belongs to no flag", way_out="Quote paths that hold spaces."))
    return problems


def _convert(namespace: Namespace, given: GivenFlags) -> list[Problem]:
    """Turn the texts of numbers into numbers, in place."""
    problems = []
    values = vars(namespace)
    for name, place in given.places.items():
        flag, value = by_dest()[name], values.get(name)
        if flag.kind not in _NUMBERS or not isinstance(value, str):
            continue
        kind, words = _NUMBERS[flag.kind]
        try:
            values[name] = kind(value)
        except ValueError:
            problems.append(Problem(f"'{value}' is not {words}", str(place)))
    return problems


def _world_size(namespace: Namespace, given: GivenFlags, environment: Mapping[str, str]) -> int | None:
    """The number of ranks: of the job that runs, or of the flags for torchrun."""
    if "WORLD_SIZE" in environment:
        return _number(environment, "WORLD_SIZE", 1)
    if "nproc_per_node" in given.places or "nnodes" in given.places:
        return (namespace.nproc_per_node or 1) * (namespace.nnodes or 1)
    return None


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdigit():
        raise UsageError(f"'{text}' is not a whole number", where=name, way_out="torchrun sets it.")
    return int(text)


def count_of(problems: Sequence[Problem]) -> str:
    """Return the number of problems in words, `1 problem` or `2 problems`."""
    if len(problems) == 1:
        return "1 problem"
    return f"{len(problems)} problems"


# --- one YAML ---------------------------------------------------------------------------------------------------------

_FLAGS = ("gpt_args", "lora_args")
_FILES = ("data", "model")
_TOOLS = "MM_TOOL_PATH"


@dataclass
class OneYaml:
    """What such a file holds."""

    path: Path | None = None
    words: list[str] = field(default_factory=list)
    """The file's flags, as a command line has them."""
    places: dict[str, SourcePosition] = field(default_factory=dict)
    """Name of a flag → its line."""
    sections: dict[str, Node] = field(default_factory=dict)
    """`data` and `model`."""


def _read_one_yaml(path: Path) -> OneYaml:
    """The flags and the files in one YAML.

    Raises:
        ConfigError: It cannot be read, has no `gpt_args`, or has keys that are neither sections nor anchors.
    """
    root = parse_yaml(read_config_text(path), str(path)).root
    if not isinstance(root.value, dict) or "gpt_args" not in root.value:
        raise ConfigError(
            "has no section gpt_args",
            where=str(path),
            way_out="A YAML with sections such as training: and parallel: is for mm train.",
        )
    found = OneYaml(path)
    problems: list[Problem] = []
    for name, entry in root.value.items():
        if name in _FLAGS:
            for flag, node in _flags(entry.node):
                _add(found, flag, node, problems)
        elif name == _TOOLS:
            _add(found, "mm_tool", entry.node, problems)
        elif name in _FILES:
            found.sections[name] = entry.node
        elif isinstance(entry.node.value, dict):
            near = did_you_mean(name, (*_FLAGS, *_FILES)).strip()
            problems.append(Problem("unknown section", str(entry.key), name, near))
    if problems:
        raise ConfigError(f"{path}: {len(problems)} problems", problems=problems)
    return found


def _flags(node: Node) -> Iterator[tuple[str, Node]]:
    """(name, value) of each flag, those of nested sections too."""
    for name, entry in entries_of(node).items():
        if isinstance(entry.node.value, dict):
            yield from _flags(entry.node)
        else:
            yield name, entry.node


def _add(found: OneYaml, name: str, node: Node, problems: list[Problem]) -> None:
    value: Any = plain(node)
    flag = by_spelling().get(f"--{name}")
    if flag is None:
        meant = nearest_flag(name, by_spelling()).removeprefix("--")
        problems.append(Problem("unknown flag", str(node.place), name, f"Did you mean '{meant}'?" if meant else ""))
    elif value is None or value is False:
        return
    elif flag.kind == "switch" and value is not True:
        problems.append(Problem(f"{show(value)} is not true or false", str(node.place), name))
    elif flag.kind != "switch" and value is True:
        problems.append(Problem("needs a value, not true", str(node.place), name))
    else:
        found.words.append(f"--{flag.name}")
        if flag.kind != "switch":
            found.words += map(str, value if isinstance(value, list) else [value])
        found.places[flag.dest] = node.place
