"""Questions about the schema's classes: which section stands at a key, and where a key of some name belongs."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.value_types import PATTERNS, OpenSection, Section


def section_of(annotation: object) -> type[Section] | None:
    """The section class inside a field's type, be it optional or a tuple of sections."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple, Annotated):
        for section in filter(None, map(section_of, get_args(annotation))):
            return section
    return None


def is_open(section: type[Section]) -> bool:
    """Whether plugins may add keys to the section."""
    return issubclass(section, OpenSection)


def walk_fields(section: type[Section] = Arguments, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the schema with its dotted name, sections before what they hold."""
    for name, info in section.model_fields.items():
        yield prefix + name, info
        inner = section_of(info.annotation)
        if inner is not None:
            yield from walk_fields(inner, f"{prefix}{name}.")


@cache
def places_of_name() -> dict[str, list[str]]:
    """Last part of a key → the dotted keys that end so."""
    places: dict[str, list[str]] = {}
    for key, _ in walk_fields():
        # They are those of the training data once more.
        if not key.startswith("data.val_dataset_param."):
            places.setdefault(key.rpartition(".")[2], []).append(key)
    return places


@cache
def pattern_keys() -> tuple[str, ...]:
    """The dotted keys that hold patterns of module or parameter names."""
    return tuple(key for key, info in walk_fields() if PATTERNS in info.metadata or _is_patterns(info.annotation))


def _is_patterns(annotation: object) -> bool:
    """Whether a type, or a part of a union, is `Patterns`."""
    return PATTERNS in get_args(annotation) or any(_is_patterns(part) for part in get_args(annotation))
