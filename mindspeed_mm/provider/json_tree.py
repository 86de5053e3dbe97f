"""A JSON file as a tree whose values know their line and column."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.params.yaml.config_text import read_config_text
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.fsdp.params.yaml.tree import MappingEntry, Node, SourcePosition, as_node, find, place_of, plain


def read_json_tree(path: Path) -> Node:
    """The object in a file.

    Raises:
        ConfigError: No such file, not JSON (with line and column), or no object.
    """
    text = read_config_text(path)
    try:
        content: Any = parse_json(text)
    except json.JSONDecodeError as error:
        where = str(SourcePosition(str(path), error.lineno, error.colno))
        raise ConfigError(f"not valid JSON: {error.msg[:1].lower()}{error.msg[1:]}", where=where) from None
    except ValueError as error:
        raise ConfigError(f"not valid JSON: {error}", where=str(path)) from None
    if not isinstance(content, dict):
        raise ConfigError("holds no object", where=str(path), way_out="A file of settings begins with {.")
    return _with_places(text, content, str(path))


def _with_places(text: str, content: Mapping[str, object], source: str) -> Node:
    """JSON is YAML but for tabs and some escapes; where YAML reads something else, the file is the only place."""
    try:
        document = parse_yaml(text.replace("\t", " "), source)
    except ConfigError:
        return as_node(content, SourcePosition(source))
    root = document.root
    if plain(root) != content:
        return as_node(content, SourcePosition(source))
    return root


def place_at(root: Node, key: str) -> SourcePosition:
    """Where the value at a dotted key stands, or what is around it where there is none."""
    return place_of(root, key.split("."))


def entries_of(node: Node) -> dict[str, MappingEntry]:
    """The entries of an object; none of anything else."""
    if isinstance(node.value, dict):
        return node.value
    return {}


def entries_at(root: Node, name: str) -> dict[str, MappingEntry]:
    """The entries of the object of a name; none where there is no such object."""
    entry = find(root, name)
    if entry is not None:
        return entries_of(entry.node)
    return {}
