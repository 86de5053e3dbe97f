"""The form: every key of the JSON schema as a field, and what was filled in as lines of a YAML that keeps its
comments."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from mindspeed_mm.core.errors import ConfigError, UsageError
from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.fsdp.params.schema import json_schema
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml

FIRST = (
    "model.model_name_or_path",
    "data.dataset_param.basic_parameters.dataset",
    "data.dataset_param.basic_parameters.dataset_dir",
    "data.dataset_param.basic_parameters.cutoff_len",
    "training.lr",
    "training.train_iters",
    "training.micro_batch_size",
    "training.gradient_accumulation_steps",
    "training.lora.enable",
    "training.lora.rank",
    "training.save",
    "training.save_interval",
)
"""Keys that nearly every run sets: they come first."""
_WIDTH = 10_000
"""Long values stay on their line."""

Field = dict[str, Any]
"""`key`, `help`, `default` as YAML, `kind` (`choice`, `number` or `text`), and `choices`, `least`, `most` where the
schema has any."""


@lru_cache(maxsize=1)
def fields() -> list[Field]:
    """One for each key that holds a value: those of `FIRST`, then the others in the order of the schema."""
    schema = json_schema()
    found = {each["key"]: each for each in _walk(schema, schema["$defs"], "")}
    return [found[key] for key in dict.fromkeys((*FIRST, *found))]


def _walk(section: JsonMapping, sections: JsonMapping, prefix: str) -> Iterator[Field]:
    for name, entry in section.get("properties", {}).items():
        key = f"{prefix}{name}"
        inner = _section_of(entry, sections)
        if inner is not None:
            yield from _walk(inner, sections, f"{key}.")
        else:
            yield _field(key, entry)


def _section_of(entry: JsonMapping, sections: JsonMapping) -> JsonMapping | None:
    """The section that an entry holds, directly or unless it is null."""
    for each in (entry, *entry.get("anyOf", ())):
        reference = each.get("$ref", "")
        section: JsonMapping = sections.get(reference.rpartition("/")[2], {})
        if "properties" in section:
            return section
    return None


def _field(key: str, entry: JsonMapping) -> Field:
    kinds = [each for each in (entry, *entry.get("anyOf", ())) if each.get("type") != "null"]
    choices = [str(word) for each in kinds for word in each.get("enum", ())]
    types = {each["type"] for each in kinds if "type" in each}
    found: Field = {"key": key, "help": " ".join(str(entry.get("description", "")).split()), "kind": "text"}
    found["default"] = _written(entry["default"]) if entry.get("default") is not None else ""
    if types == {"boolean"}:
        choices = ["true", "false"]
    if choices and types <= {"string", "boolean"}:
        found |= {"kind": "choice", "choices": list(dict.fromkeys(choices))}
    elif types and types <= {"integer", "number"}:
        bounds = next(each for each in kinds if "type" in each)
        found |= {"kind": "number", "whole": types == {"integer"}}
        found |= {name: bounds[word] for word, name in _BOUNDS.items() if word in bounds}
    return found


_BOUNDS = {"minimum": "least", "ge": "least", "maximum": "most", "le": "most"}
"""Words of the schema → of a field."""


def _written(value: object) -> str:
    """A plain value as YAML on one line."""
    yaml, text = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style, yaml.width = True, _WIDTH
    yaml.dump(value, text)
    return text.getvalue().removesuffix("...\n").strip()


def compose(text: str, values: Mapping[str, str]) -> str:
    """A YAML with some of its keys set; comments, order and everything else stay.

    Args:
        text: The YAML, which may be empty.
        values: Dotted key → its value as YAML; an empty one takes the key out.

    Raises:
        ConfigError: The text or a value is no YAML.
        UsageError: A key leads through something that is no section.
    """
    root = _round_trip(text)
    for key, written in values.items():
        *parents, last = key.split(".")
        section = root
        for name in parents:
            if section.get(name) is None:
                section[name] = CommentedMap()
            section = section[name]
            if not isinstance(section, CommentedMap):
                raise UsageError(f"'{name}' holds a value, not a section", key=key, way_out="Take the value out first.")
        if written.strip():
            section[last] = _value(written, key)
        else:
            section.pop(last, None)
    _prune(root)
    out = io.StringIO()
    _yaml().dump(root, out)
    if root:
        return out.getvalue()
    return ""


def _round_trip(text: str) -> CommentedMap:
    parse_yaml(text, "the YAML")  # its limits on size, depth and tags
    try:
        root = _yaml().load(text)
    except (YAMLError, ValueError) as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())[:200]}", where="the YAML") from error
    if root is None:
        return CommentedMap()
    if not isinstance(root, CommentedMap):
        raise ConfigError("holds no sections", where="the YAML", way_out="Begin with a section, such as 'model:'.")
    return root


def _value(written: str, key: str) -> object:
    parse_yaml(written, key)
    try:
        return _yaml().load(written)
    except (YAMLError, ValueError) as error:
        raise ConfigError(f"'{written[:100]}' is not valid YAML", where="the form", key=key) from error


def _prune(section: CommentedMap) -> None:
    """Take out sections that hold nothing any more."""
    for name, inner in list(section.items()):
        if isinstance(inner, CommentedMap):
            _prune(inner)
            if not inner:
                del section[name]


def _yaml() -> YAML:
    yaml = YAML()
    yaml.width, yaml.preserve_quotes = _WIDTH, True
    return yaml
