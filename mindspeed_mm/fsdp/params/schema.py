"""The schema as a reference: help, type and default of each key, and JSON schema."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.suggest import nearest
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.other_tools import keys_with_value, suggested_keys, suggested_sentences
from mindspeed_mm.fsdp.params.rules.unbuilt import BUILT_VALUES, acting_datasets
from mindspeed_mm.fsdp.params.schema_walk import places_of_name, section_of, walk_fields
from mindspeed_mm.fsdp.params.value_types import show
from mindspeed_mm.fsdp.params.yaml.key_renames import ALIASES, MEANINGLESS, SWITCHES

_TYPE_NAMES = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    type(None): "null",
    Any: "anything",
}


@dataclass(frozen=True)
class KeyReference:
    """What a person wants to know of one key."""

    key: str
    type: str
    default: str
    help: str
    other_names: tuple[str, ...] = ()
    this_version: str = ""
    """What this version takes, where that is less than the schema."""


def json_schema() -> JsonObject:
    """JSON schema of the whole configuration, for editors."""
    schema = Arguments.model_json_schema() | {"title": "MindSpeed-MM configuration"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def reference(key: str = "") -> list[KeyReference]:
    """References of one key, or of every key of a section, or of all.

    Raises:
        UsageError: No such key; the message names the nearest.
    """
    found = [_describe(name, info) for name, info in walk_fields() if _is_asked_for(name, key)]
    if not found:
        raise UsageError("no such key", key=key, way_out=_way_to(key))
    return found


def _way_to(key: str) -> str:
    """What to say to somebody who asks for a key that there is not."""
    moved = dict(ALIASES).get(key) or MEANINGLESS.get(key)
    if moved:
        return f"It is {moved}."
    for old, new, meanings in SWITCHES:
        if old == key:
            both = (f"{_as_written(value)} as {new}: {_as_written(meant)}" for value, meant in meanings.items())
            return f"It is read: {', '.join(both)}."
    last = key.rpartition(".")[2]
    if meant := suggested_keys().get(last):
        return f"It is {meant} here."
    if sentence := suggested_sentences().get(last):
        return f"{sentence}."
    if holders := keys_with_value(key):
        return f"It is a value of {' and of '.join(holders[:3])}."
    names = [name for name, _ in walk_fields()]
    near = [name for name in names if name.endswith(f".{key}")]
    if not near:
        near = nearest(key, names, most=3, likeness=0.8)
    if not near:
        by_last = places_of_name()
        for last in nearest(key.rpartition(".")[2], by_last):
            near += by_last[last]
    if near:
        return f"Did you mean {' or '.join(near[:3])}?"
    return f"Sections: {', '.join(Arguments.model_fields)}."


def _is_asked_for(name: str, key: str) -> bool:
    return not key or name == key or name.startswith(f"{key}.")


def _describe(key: str, info: FieldInfo) -> KeyReference:
    is_whole_section = section_of(info.annotation) is not None and info.default_factory is not None
    default = ""
    if not is_whole_section and not info.is_required():
        default = _as_written(info.get_default(call_default_factory=True))
    return KeyReference(
        key=key,
        type=type_name(info),
        default=default,
        help=re.sub(r"\s+", " ", info.description or "").strip(),
        other_names=tuple(old for old, new in ALIASES if new == key),
        this_version=_this_version(key),
    )


def _this_version(key: str) -> str:
    if key not in BUILT_VALUES:
        return ""
    only = f"only {' or '.join(map(_as_written, BUILT_VALUES[key]))}"
    if acting := acting_datasets(key):
        only += " unless dataset_type is " + " or ".join((*acting, "a plugin's"))
    return only


def _as_written(value: object) -> str:
    return show(list(value) if isinstance(value, tuple) else value)


def type_name(info: FieldInfo) -> str:
    """The type of a key in words, with its limits."""
    limits = [_limit(rule) for rule in _rules(info)]
    return ", ".join([_name(info.annotation), *dict.fromkeys(filter(None, limits))])


def _limit(rule: object) -> str:
    """A limit of numbers in words; empty for other rules."""
    match rule:
        case Ge(least):
            return f"at least {least:g}"
        case Gt(below):
            return f"above {below:g}"
        case Le(most):
            return f"at most {most:g}"
        case Lt(above):
            return f"below {above:g}"
    return ""


def _rules(info: FieldInfo) -> Iterator[object]:
    yield from info.metadata
    for part in get_args(info.annotation):
        if get_origin(part) is not Annotated:
            continue
        for rule in get_args(part)[1:]:
            if isinstance(rule, FieldInfo):
                yield from rule.metadata
            else:
                yield rule


def _name(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if section_of(annotation) is not None:
        if origin is tuple:
            return "list of sections"
        return "section"
    if origin is Annotated:
        return _name(parts[0])
    if origin is Literal:
        return " | ".join(str(part) for part in parts)
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(_name(part) for part in parts))
    if origin is tuple:
        name = _name(parts[0])
        if "|" in name:
            return f"list of {name}"
        return f"list of {name}s"
    if origin is dict:
        return "mapping"
    return _TYPE_NAMES.get(annotation, str(annotation))
