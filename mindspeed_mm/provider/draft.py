"""A configuration in the making: each value with the flag or the line of the file that gave it, so that two of them
that disagree are named together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.value_types import show
from mindspeed_mm.fsdp.params.yaml.tree import (
    MappingEntry,
    Node,
    SourcePosition,
    as_node,
    find,
    merge,
    nest,
    plain,
    value_at_key,
)

FROM_FLAGS = "flags"
"""The source of a configuration that no single file gives."""


def derived(words: str) -> SourcePosition:
    """The place of a value that was worked out from others."""
    return SourcePosition(f"derived: {words}")


class Draft:
    """The tree of a configuration, and what was noticed while it was made."""

    def __init__(self) -> None:
        self.root = Node({}, SourcePosition(FROM_FLAGS))
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        """What a person should know, each once."""

    def put(self, key: str, value: object, place: SourcePosition) -> None:
        """Set a key. Where it has another value already, both are named as a contradiction."""
        held = find(self.root, key)
        if held is None or held.node.value is None:
            self.replace(key, value, place)
        elif plain(held.node) != as_plain(value):
            self.problem(
                f"{show(as_plain(value))}, but {held.node.place} says {show(plain(held.node))} ({key})",
                place,
                "Keep one of them.",
            )

    def put_node(self, key: str, node: Node) -> None:
        """Set a key to what a file says, whose values know their places."""
        self.replace(key, node, node.place)

    def replace(self, key: str, value: object, place: SourcePosition) -> None:
        """Set a key, whatever it had."""
        node = value if isinstance(value, Node) else as_node(as_plain(value), place)
        parents = key.split(".")[:-1]
        for depth in range(1, len(parents) + 1):  # a section that a file leaves empty takes keys
            parent = find(self.root, ".".join(parents[:depth]))
            if parent is not None and parent.node.value is None:
                parent.node.value = {}
        merge(self.root, nest(key, MappingEntry(place, node)))

    def fill(self, key: str, value: object, words: str) -> None:
        """Set a key that nobody has given."""
        if self.value(key) is None:
            self.replace(key, value, derived(words))

    def value(self, key: str, default: Any = None) -> Any:
        """What a key has so far."""
        value = value_at_key(self.root, key)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Whether a key is set, be it to null."""
        return find(self.root, key) is not None

    def place(self, key: str) -> SourcePosition:
        """Where a key got its value."""
        entry = find(self.root, key)
        return entry.node.place if entry is not None else SourcePosition(key)

    def note(self, words: str) -> None:
        """Tell a person something, once."""
        if words not in self.notes:
            self.notes.append(words)

    def problem(self, what: str, place: SourcePosition | str = "", way_out: str = "") -> None:
        """Something that nobody but the user can put right."""
        self.problems.append(Problem(what, str(place), way_out=way_out))


def as_plain(value: Any) -> Any:
    """A value as files hold it: lists, not tuples."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
