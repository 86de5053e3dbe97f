"""Keys that the schema does not have: declared by a plugin, unchecked, or errors that say what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.core.suggest import did_you_mean, nearest
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.other_tools import suggested_keys, suggested_sentences
from mindspeed_mm.fsdp.params.schema_walk import is_open, places_of_name, section_of
from mindspeed_mm.fsdp.params.value_types import Flag, Number, Section, Whole, show
from mindspeed_mm.fsdp.params.yaml.tree import MappingEntry, Node, plain


@dataclass
class Scope:
    """What may stand in an open section besides the schema's keys, by the section's dotted key."""

    declared: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Section → key → default, as plugins declared them."""
    unchecked: frozenset[str] = frozenset()
    """Sections of plugins that are not imported."""


@dataclass
class Findings:
    """What a walk over a tree found."""

    problems: list[Problem] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    """Keys that only their plugin can judge."""


def judge_keys(root: Node, scope: Scope) -> Findings:
    """Look at every key of a tree; take out those that are errors, so that values are judged without them."""
    findings = Findings()
    _judge(root, Arguments, "", scope, findings)
    return findings


def _judge(node: Node, section: type[Section], prefix: str, scope: Scope, findings: Findings) -> None:
    for name, entry in list(node.value.items()):
        info = section.model_fields.get(name)
        declared = scope.declared.get(prefix.rstrip("."), {})
        if name in declared:
            findings.problems += _check_declared(prefix + name, entry, declared[name])
        elif info is not None:
            inner = section_of(info.annotation)
            items = entry.node.value if isinstance(entry.node.value, list) else [entry.node]
            for item in items:
                if inner is not None and isinstance(item.value, dict):
                    _judge(item, inner, f"{prefix}{name}.", scope, findings)
        elif is_open(section) and prefix.rstrip(".") in scope.unchecked:
            findings.unchecked.append(prefix + name)
        else:
            if prefix or not entry.node.anchored:  # at the top, a key of any name may hold anchors
                findings.problems.append(_unknown(name, entry, section, prefix, declared))
            del node.value[name]


@dataclass(frozen=True)
class _Kind:
    words: str
    reads: TypeAdapter[Any] | None = None


_KINDS: dict[type, _Kind] = {
    bool: _Kind("true or false", TypeAdapter(Flag)),
    int: _Kind("a whole number", TypeAdapter(Whole)),
    float: _Kind("a number", TypeAdapter(Number)),
    str: _Kind("a text"),
    list: _Kind("a list"),
}
"""Type of a default → what its key takes."""


def _check_declared(key: str, entry: MappingEntry, default: Any) -> list[Problem]:
    """A declared key has the type of its default; `yes` is a truth value and 1 a number, as in the schema itself."""
    value = plain(entry.node)
    if default is None or value is None or type(value) is type(default):
        return []
    kind = _KINDS.get(type(default))
    if kind is not None and kind.reads is not None:
        try:
            entry.node.value = kind.reads.validate_python(value)
            return []
        except ValidationError:
            pass
    wanted = kind.words if kind else "a mapping"
    way_out = f"The plugin's default is {show(default)}."
    return [Problem(f"{show(value)} is not {wanted}", str(entry.node.place), key, way_out)]


def _unknown(name: str, entry: MappingEntry, section: type[Section], prefix: str, declared: Iterable[str]) -> Problem:
    return Problem("unknown key", str(entry.key), prefix + name, explain_unknown(name, section, declared))


def explain_unknown(name: str, section: type[Section], declared: Iterable[str] = ()) -> str:
    """What was probably meant by a key that the section does not have."""
    here = [*section.model_fields, *declared]
    before, colon, after = name.partition(":")
    if colon and before in here:
        return f"YAML wants a space after the colon: '{before}: {after}'."
    if told := _in_words_of_others(name, here):
        return told
    if name.isdigit():
        return "If it belongs to the number before the comma: YAML writes decimals with a point, 0.1."
    places = places_of_name()
    if name in places:
        return f"It belongs elsewhere: {' or '.join(places[name][:3])}."
    if hint := did_you_mean(name, here):
        return hint.strip()
    mistyped = next(iter(nearest(name, suggested_keys(), likeness=0.8)), "")
    if told := _in_words_of_others(mistyped, here):
        return told
    near = nearest(name, places, likeness=0.8)
    if near:
        return f"Did you mean '{places[near[0]][0]}'?"
    return f"Keys here: {', '.join(here)}."[:400]


def _in_words_of_others(name: str, here: Sequence[str]) -> str:
    """What a word of another tool is called here; empty for any other word."""
    key = suggested_keys().get(name)
    if key is None:
        sentence = suggested_sentences().get(name)
        return f"{sentence[:1].upper()}{sentence[1:]}." if sentence else ""
    last = key.rpartition(".")[2]
    return f"Did you mean '{last if last in here else key}'?"
