"""Keys that the schema does not have: declared by the chosen model, data set or plugin, unchecked where nobody knows
them, or errors that say what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.core.suggest import did_you_mean, nearest
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.cards import (
    KNOWN_DATASET_TYPES,
    KNOWN_MODEL_IDS,
    PluginKeys,
    dataset_cards,
    is_outside_plugin,
    model_cards,
)
from mindspeed_mm.fsdp.params.other_tools import suggested_keys, suggested_sentences
from mindspeed_mm.fsdp.params.schema_walk import is_open, places_of_name, section_of
from mindspeed_mm.fsdp.params.value_types import Flag, Number, Section, Whole, show
from mindspeed_mm.fsdp.params.yaml.tree import (
    MappingEntry,
    Node,
    SourcePosition,
    as_node,
    find,
    merge,
    nest,
    place_of,
    plain,
    text_at,
    value_at_key,
)


@dataclass
class Scope:
    """What may stand in an open section besides the schema's keys, by the section's dotted key."""

    declared: dict[str, JsonMapping] = field(default_factory=dict)
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


def _check_declared(key: str, entry: MappingEntry, default: object) -> list[Problem]:
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
        if sentence:
            return f"{sentence[:1].upper()}{sentence[1:]}."
        return ""
    last = key.rpartition(".")[2]
    return f"Did you mean '{last if last in here else key}'?"


# --- keys of plugins --------------------------------------------------------------------------------------------------

DATASETS = ("data.dataset_param", "data.val_dataset_param")
"""Where datasets are described."""


def own_model_keys(root: Node, plugin_keys: PluginKeys | None) -> Mapping[str, Any]:
    """Keys that the chosen model brings, with their defaults."""
    card = model_cards().get(text_at(root, "model.model_id") or "", {})
    if plugin_keys is None:
        return card
    return {**card, **plugin_keys.model}


def has_outside_plugin(root: Node) -> bool:
    """Whether `training.plugin` names a package that is not built in."""
    plugins = value_at_key(root, "training.plugin") or ()
    names = (plugins,) if isinstance(plugins, str) else plugins
    return any(is_outside_plugin(str(name)) for name in names)


def build_scope(root: Node, plugin_keys: PluginKeys | None) -> Scope:
    """What may stand in the open sections of this configuration."""
    scope = Scope({"model": own_model_keys(root, plugin_keys)})
    for dataset in DATASETS:
        card = dataset_cards().get(text_at(root, f"{dataset}.dataset_type") or "huggingface", {})
        for key, default in (card if plugin_keys is None else {**card, **plugin_keys.dataset}).items():
            section, _, name = f"{dataset}.{key}".rpartition(".")
            scope.declared.setdefault(section, {})
            scope.declared[section] = {**scope.declared[section], name: default}
    if plugin_keys is None:
        scope.unchecked = frozenset(_unchecked_sections(root))
    return scope


def _unchecked_sections(root: Node) -> list[str]:
    """Open sections whose owner is not known here: an outside plugin, or a model that has no card."""
    outside = has_outside_plugin(root)
    model_id = text_at(root, "model.model_id")
    sections = []
    if model_id not in model_cards() and (model_id in KNOWN_MODEL_IDS or outside):
        sections.append("model")
    for dataset in DATASETS:
        dataset_type = text_at(root, f"{dataset}.dataset_type") or "huggingface"
        if dataset_type not in dataset_cards() and (dataset_type.lower() in KNOWN_DATASET_TYPES or outside):
            sections += [dataset, f"{dataset}.basic_parameters", f"{dataset}.preprocess_parameters"]
    return sections


def check_ids(root: Node, plugin_keys: PluginKeys | None) -> list[Problem]:
    """Ids that nothing built in has and no outside plugin can bring."""
    if plugin_keys is not None or has_outside_plugin(root):
        return []
    known = {"model.model_id": KNOWN_MODEL_IDS | model_cards().keys()}
    known |= {f"{dataset}.dataset_type": KNOWN_DATASET_TYPES | dataset_cards().keys() for dataset in DATASETS}
    problems = []
    for key, names in known.items():
        name = text_at(root, key)
        if name is not None and name not in names and name.lower() not in names:
            hint = f"{did_you_mean(name, names)}Known ids: {', '.join(sorted(names))}. Others need training.plugin."
            problems.append(Problem(f"'{name}' is not registered", str(place_of(root, key.split("."))), key, hint))
    return problems


def fill_declared(root: Node, scope: Scope) -> set[str]:
    """Put in the defaults of declared keys that are not given; returns their dotted keys."""
    filled = set()
    no_validation = value_at_key(root, "data.val_dataset_param") is None
    for section, keys in scope.declared.items():
        entry = find(root, section)
        is_absent = section.startswith("data.val_dataset_param") and no_validation
        if is_absent or (entry is not None and not isinstance(entry.node.value, dict | None)):
            continue
        for name, default in keys.items():
            if find(root, f"{section}.{name}") is None:
                filled.add(f"{section}.{name}")
                merge(
                    root,
                    nest(
                        f"{section}.{name}",
                        MappingEntry(SourcePosition("card"), as_node(default, SourcePosition("card"))),
                    ),
                )
    return filled
