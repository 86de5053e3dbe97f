"""Dotted keys, such as `training.lora.rank`, into a tree of sections; an entry of a list is `posttrain.rewards[0]`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeVar

Tree = TypeVar("Tree")


def dotted(section: str, key: object) -> str:
    """The path of a key in a section; of one at the top the key alone."""
    if section:
        return f"{section}.{key}"
    return str(key)


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


def key_of(steps: Iterable[str | int]) -> str:
    """The dotted key of a path of names and places in lists."""
    key = ""
    for step in steps:
        if isinstance(step, int):
            key += f"[{step}]"
        else:
            key += f".{step}" if key else step
    return key


def steps_of(key: str) -> list[str | int]:
    """Split a dotted key into names and places in lists, the inverse of `key_of`."""
    steps: list[str | int] = []
    for place, name in re.findall(r"\[(\d+)\]|([^.\[\]]+)", key):
        steps.append(name or int(place))
    return steps
