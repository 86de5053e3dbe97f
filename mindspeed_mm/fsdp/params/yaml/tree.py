"""A YAML file as a tree that knows the place of every key and value, and how to read and change such a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SourcePosition:
    """Place where a key or a value was written, for messages."""

    source: str
    """A file as the user named it, or `command line`."""
    line: int = 0
    """From 1; 0 outside of files."""
    column: int = 0
    """From 1."""

    def __str__(self) -> str:
        if self.line:
            return f"{self.source}:{self.line}:{self.column}"
        return self.source


@dataclass
class Node:
    """A value with its place. `value` is a scalar, a list of nodes, or a dict of entries."""

    value: Any
    place: SourcePosition
    size: int = 1
    """Nodes inside, with aliases written out."""
    depth: int = 0
    """Levels inside."""
    anchored: bool = False
    """It, or something in it, has an anchor."""
    end: tuple[int, int] | None = None
    """Line and column, from 1, behind a scalar or an alias of a file."""


@dataclass
class MappingEntry:
    """One key of a mapping."""

    key: SourcePosition
    node: Node


def plain(node: Node) -> Any:
    """Return the value as dicts, lists and scalars, without its places."""
    if isinstance(node.value, dict):
        return {name: plain(entry.node) for name, entry in node.value.items()}
    if isinstance(node.value, list):
        return [plain(item) for item in node.value]
    return node.value


def as_node(value: object, place: SourcePosition) -> Node:
    """A tree of a plain value, all of it at one place."""
    if isinstance(value, dict):
        return Node({str(name): MappingEntry(place, as_node(item, place)) for name, item in value.items()}, place)
    if isinstance(value, list | tuple):
        return Node([as_node(item, place) for item in value], place)
    return Node(value, place)


def clone(node: Node) -> Node:
    """A copy that shares nothing with the original, nor with itself where aliases did."""
    value = node.value
    if isinstance(value, dict):
        value = {name: MappingEntry(entry.key, clone(entry.node)) for name, entry in value.items()}
    elif isinstance(value, list):
        value = [clone(item) for item in value]
    return Node(value, node.place, node.size, node.depth, node.anchored, node.end)


def find(root: Node, key: str) -> MappingEntry | None:
    """The entry at a dotted key."""
    node, entry = root, None
    for name in key.split("."):
        entry = node.value.get(name) if isinstance(node.value, dict) else None
        if entry is None:
            return None
        node = entry.node
    return entry


def value_at_key(root: Node, key: str) -> Any:
    """The plain value at a dotted key, or None."""
    entry = find(root, key)
    if entry:
        return plain(entry.node)
    return None


def text_at(root: Node, key: str) -> str | None:
    """The value at a dotted key if it is a text."""
    value = value_at_key(root, key)
    if isinstance(value, str):
        return value
    return None


def take(root: Node, key: str) -> MappingEntry | None:
    """Remove and return the entry at a dotted key."""
    entry = find(root, key)
    if entry is not None:
        parent, _, name = key.rpartition(".")
        holder = find(root, parent) if parent else None
        section = holder.node if holder else root
        del section.value[name]
    return entry


def nest(key: str, entry: MappingEntry) -> Node:
    """A tree that holds one entry at a dotted key."""
    *parents, last = key.split(".")
    node = Node({last: entry}, entry.key)
    for name in reversed(parents):
        node = Node({name: MappingEntry(entry.key, node)}, entry.key)
    return node


def merge(root: Node, extra: Node) -> None:
    """Put `extra` over `root`: mappings key by key, anything else as a whole."""
    for name, entry in extra.value.items():
        held = root.value.get(name)
        if held is None or not isinstance(held.node.value, dict) or not isinstance(entry.node.value, dict):
            root.value[name] = entry
        else:
            merge(held.node, entry.node)


def put(root: Node, key: str, value: object, place: SourcePosition | str) -> None:
    """Put a plain value at a dotted key, see `put_entry`; a place that is a text says where it was derived from."""
    at = SourcePosition(place) if isinstance(place, str) else place
    put_entry(root, key, MappingEntry(at, as_node(value, at)))


def put_entry(root: Node, key: str, entry: MappingEntry) -> None:
    """Put an entry at a dotted key, unless the file gives a value there; where something on the way is not a section,
    nothing is done, and the schema says what is wrong."""
    names = key.split(".")
    for length in range(1, len(names)):
        section = find(root, ".".join(names[:length]))
        if section is not None and section.node.value is not None and not isinstance(section.node.value, dict):
            return
    if value_at_key(root, key) is None:
        merge(root, nest(key, entry))


def move(root: Node, old: str, new: str) -> None:
    """Take the entry at one dotted key and put it at another, see `put_entry`."""
    entry = take(root, old)
    if entry is not None:
        put_entry(root, new, entry)


def place_of(root: Node, location: Sequence[str | int]) -> SourcePosition:
    """Place of the value at a path of keys and list positions, or of the last part of the path that exists."""
    node = root
    for step in location:
        if isinstance(node.value, dict) and step in node.value:
            node = node.value[step].node
        elif isinstance(node.value, list) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
        else:
            break
    return node.place
