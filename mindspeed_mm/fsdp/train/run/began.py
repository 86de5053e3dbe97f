"""A resumed run keeps the defaults that it began with, though those of this version may be others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from mindspeed_mm.checkpoint.layout import list_iterations
from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.core.config_path import value_at
from mindspeed_mm.core.errors import CheckpointError, ConfigError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.params.argument import Arguments, TrainingArguments
from mindspeed_mm.fsdp.params.loader import ResolvedConfig, resolved_dict
from mindspeed_mm.fsdp.params.rules.all import check_cross_section
from mindspeed_mm.fsdp.params.value_types import Section
from mindspeed_mm.fsdp.params.yaml.config_text import read_config_text
from mindspeed_mm.fsdp.params.yaml.origins import UNSET, Origin, leaves, read_defaults
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.fsdp.params.yaml.tree import plain
from mindspeed_mm.fsdp.train.run.train_options import ResumeOptions

_FOUND_AGAIN = ("model_name_or_path", "train_from_scratch")
"""Last parts of keys that nothing set and that a run fills in, from the sizes of a launch script: it does so again, and
compares."""


def as_run_began(config: ResolvedConfig, options: ResumeOptions) -> ResolvedConfig:
    """The configuration of a run that is resumed: keys that nothing set, neither then nor now, have the values with
    which the run began, as its `resolved.yaml` holds them. Any other configuration is returned as it is.

    Raises:
        ConfigError: These values and what is set now break a rule.
    """
    resolved = _resolved_of_resumed(config.arguments.training, options)
    if resolved is None:
        return config
    text = read_config_text(resolved)
    root = plain(parse_yaml(text, str(resolved)).root)
    began = dict(leaves(root)) if isinstance(root, dict) else {}
    tree, origins = resolved_dict(config), dict(config.origins)
    now = dict(leaves(tree))
    for key in read_defaults(text) & now.keys() & began.keys():
        # A name in a mapping, such as a file's, may hold dots: it is no key of the schema, and was set.
        if key.endswith(_FOUND_AGAIN):
            continue
        if now[key] != began[key] and origins[key].kind in UNSET and _has_key(tree, key):
            _set(tree, key, began[key])
            origins[key] = Origin("run", str(resolved))
    if origins == config.origins:
        return config
    arguments = _checked_tree(tree, resolved)
    return replace(config, arguments=arguments, origins=origins)


def kept_defaults(config: ResolvedConfig) -> str:
    """The values that `as_run_began` has kept and that would be others now, for the log; empty where there are none."""
    values = dict(leaves(resolved_dict(config)))
    kept = []
    for key, origin in config.origins.items():
        if origin.kind == "run" and not _is_what_null_means(config.arguments, key):
            kept.append(f"{key} {values[key]}")
    return ", ".join(kept)


def _is_what_null_means(arguments: Arguments, key: str) -> bool:
    """Whether a key has the value that its default of now, null, stands for."""
    holder, _, name = key.rpartition(".")
    section = value_at(arguments, holder) if holder else arguments
    if not isinstance(section, Section) or name not in section.NULL_MEANS:
        return False
    unset = section.model_copy(update={name: None})
    return bool(getattr(unset, section.NULL_MEANS[name]) == section[name])


def _resolved_of_resumed(training: TrainingArguments, options: ResumeOptions) -> Path | None:
    """`resolved.yaml` of the run that is resumed; None where none is, or it kept none."""
    found = None
    if training.save and options.resume and list_iterations(Path(training.save)):
        found = Path(training.save)
    elif training.load and not options.weights_only and not training.no_load_optim:
        load = Path(training.load)
        found = next((folder for folder in (load, load.absolute().parent) if list_iterations(folder)), None)
    resolved = RunFolder(found).resolved if found is not None else None
    if resolved is not None and resolved.is_file():
        return resolved
    return None


def _has_key(tree: Mapping[str, object], key: str) -> bool:
    try:
        value_at(tree, key)
    except KeyError:
        return False
    return True


def _set(tree: JsonObject, key: str, value: object) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree[section]
    tree[name] = value


def _checked_tree(tree: Mapping[str, object], resolved: Path) -> Arguments:
    try:
        arguments = Arguments.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"holds a value that this version does not accept: {first['msg']}",
            where=str(resolved),
            key=key,
            way_out="Set the key in the configuration.",
        ) from error
    problems = [replace(each, where=each.where or str(resolved)) for each in check_cross_section(arguments)]
    if problems:
        raise ConfigError(f"{len(problems)} values with which the run began do not fit", problems=problems)
    return arguments
