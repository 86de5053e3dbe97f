"""`section.key=value` on the command line, or sections given in Python, put over the file's tree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.fsdp.params.value_types import Section, show
from mindspeed_mm.fsdp.params.yaml.key_renames import Notes
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.fsdp.params.yaml.tree import MappingEntry, Node, SourcePosition, as_node, nest, plain

COMMAND_LINE = "command line"
"""The place of everything that an override holds."""
ARGUMENTS = "arguments"
"""The place of sections that a call in Python gives beside a configuration."""
CONFIGURATION = "configuration"
"""The place of a configuration that is a mapping in Python, not a file."""
NOT_FILES = (COMMAND_LINE, ARGUMENTS, CONFIGURATION)


def parse_override(override: str, notes: Notes) -> Node | None:
    """A tree with the one key of an override; None, and a problem in `notes`, when it is malformed."""
    key, sign, value = override.partition("=")
    names = key.strip().split(".")
    if not sign or not all(names) or override.startswith("-"):
        message = f"'{override}' is not section.key=value"
        hint = "Overrides take no dashes." if override.startswith("-") else "Example: training.lr=2e-5."
        notes.problems.append(Problem(message, COMMAND_LINE, way_out=hint))
        return None
    try:
        node = parse_yaml(value, COMMAND_LINE).root
    except ConfigError as error:
        notes.problems.append(Problem(error.problems[0].what, COMMAND_LINE, key, error.problems[0].way_out))
        return None
    _stamp(node)
    return nest(".".join(names), MappingEntry(SourcePosition(COMMAND_LINE), node))


def _stamp(node: Node) -> None:
    """Places inside a one-line override say nothing: the whole came from the command line."""
    node.place = SourcePosition(COMMAND_LINE)
    if isinstance(node.value, dict):
        for entry in node.value.values():
            entry.key = SourcePosition(COMMAND_LINE)
            _stamp(entry.node)
    elif isinstance(node.value, list):
        for item in node.value:
            _stamp(item)


def override_of(values: Mapping[str, object]) -> Node:
    """A tree of sections that were given in Python."""
    return as_node(to_plain(values), SourcePosition(ARGUMENTS))


def to_plain(value: object) -> Any:
    """What a YAML file could say: typed sections as mappings, paths as texts, the rest as it is."""
    if isinstance(value, Section):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(name): to_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    return value


def put_over(root: Node, extra: Node, notes: Notes, *, key: str = "") -> None:
    """Merge an override key by key; what would go through a value that holds no keys is a problem in `notes`."""
    for name, entry in extra.value.items():
        here = f"{key}.{name}" if key else name
        held = root.value.get(name)
        if held is None or held.node.value is None or not isinstance(entry.node.value, dict):
            root.value[name] = entry
        elif isinstance(held.node.value, dict):
            put_over(held.node, entry.node, notes, key=here)
        else:
            what = f"has no keys below it: it is {show(plain(held.node))} at {held.node.place}"
            notes.problems.append(Problem(what, entry.key.source, here))
