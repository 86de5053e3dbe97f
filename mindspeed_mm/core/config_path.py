"""Dotted keys, such as `training.lora.rank`, into a tree of sections."""

from __future__ import annotations

from typing import Any, TypeVar

Tree = TypeVar("Tree")


def dotted(section: str, key: object) -> str:
    """The path of a key in a section; of one at the top the key alone."""
    return f"{section}.{key}" if section else str(key)


def value_at(tree: Any, key: str, absent: Any = None) -> Any:
    """The value at a dotted key.

    Args:
        tree: A section, or a mapping.
        key: Names of sections, and last the name of the value, joined by dots.
        absent: The answer where a section on the way is null.

    Raises:
        KeyError: A section does not have the name.
    """
    for name in key.split("."):
        if tree is None:
            return absent
        tree = tree[name]
    return tree


def with_value(tree: Tree, key: str, value: object) -> Tree:
    """A copy of the sections with another value at a dotted key. Values are not validated again.

    Raises:
        KeyError: A section does not have the name.
    """
    section: Any = tree
    name, _, rest = key.partition(".")
    inner = section[name]
    changed: Tree = section.model_copy(update={name: with_value(inner, rest, value) if rest else value})
    return changed
