"""What the chosen model and dataset may add to a configuration, and whether anybody knows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.params.cards import (
    KNOWN_DATASET_TYPES,
    KNOWN_MODEL_IDS,
    PluginKeys,
    dataset_cards,
    is_outside_plugin,
    model_cards,
)
from mindspeed_mm.fsdp.params.yaml.tree import (
    MappingEntry,
    Node,
    SourcePosition,
    as_node,
    find,
    merge,
    nest,
    place_of,
    text_at,
    value_at_key,
)
from mindspeed_mm.fsdp.params.yaml.unknown_keys import Scope

DATASETS = ("data.dataset_param", "data.val_dataset_param")
"""Where datasets are described."""


def own_model_keys(root: Node, plugin_keys: PluginKeys | None) -> Mapping[str, Any]:
    """Keys that the chosen model brings, with their defaults."""
    card = model_cards().get(text_at(root, "model.model_id") or "", {})
    return card if plugin_keys is None else {**card, **plugin_keys.model}


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
