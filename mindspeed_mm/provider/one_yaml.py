"""One YAML in place of flags and JSON files: `gpt_args` and `lora_args` are flags, `data` and `model` the files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.params.value_types import show
from mindspeed_mm.fsdp.params.yaml.config_text import read_config_text
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.fsdp.params.yaml.tree import Node, SourcePosition, plain
from mindspeed_mm.provider.flags import by_spelling, nearest_flag
from mindspeed_mm.provider.json_tree import entries_of

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


def read_one_yaml(path: Path) -> OneYaml:
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
