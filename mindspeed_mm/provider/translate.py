"""From a namespace of flags, and the files that they name, to the configuration that a YAML gives."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.config_path import value_at
from mindspeed_mm.core.errors import ConfigError, MMError, Problem
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.cards import PluginKeys
from mindspeed_mm.fsdp.params.loader import ResolvedConfig, load_config
from mindspeed_mm.fsdp.params.rules.idle import unread_of_training
from mindspeed_mm.fsdp.params.yaml.tree import Node, clone, plain, take
from mindspeed_mm.provider import flag_rules, memory_rules, size_rules
from mindspeed_mm.provider.data_json import put_data
from mindspeed_mm.provider.flags import FLAGS, by_dest
from mindspeed_mm.provider.json_tree import read_json_tree
from mindspeed_mm.provider.model_json import put_model
from mindspeed_mm.provider.parse import count_of, parse
from mindspeed_mm.provider.preference_rules import preferences
from mindspeed_mm.provider.reading import FROM_FLAGS, Reading

RULES: tuple[Callable[[Reading], None], ...] = (
    flag_rules.script_of_one_model,
    size_rules.ranks,
    size_rules.context_sizes,
    size_rules.accumulation,
    size_rules.pipeline_schedule,
    size_rules.token_dispatcher,
    size_rules.whole_experts,
    size_rules.sequence_parallel,
    size_rules.sharding,
    size_rules.floating_point_types,
    flag_rules.warm_up,
    flag_rules.decay,
    flag_rules.optimizer,
    flag_rules.constant_weight_decay,
    flag_rules.undecayed_parameters,
    flag_rules.scaled_learning_rates,
    flag_rules.starting_point,
    flag_rules.checkpoint_format,
    flag_rules.validation,
    flag_rules.waiting_times,
    flag_rules.profiled_steps,
    flag_rules.longest_sample,
    flag_rules.worker_processes,
    flag_rules.order_of_rows,
    flag_rules.trusted_code,
    flag_rules.adapters,
    flag_rules.picture_size,
    flag_rules.noise_levels,
    flag_rules.samples,
    flag_rules.framework,
    preferences,
    memory_rules.recomputation,
    memory_rules.kept_attention,
    memory_rules.fused_kernels,
    flag_rules.loss_of_samples,
)
"""The rules of flags that are more than a key, in an order in which each finds what it reads."""

_REQUIRED = {
    "training.micro_batch_size": "--micro-batch-size",
    "training.train_iters": "--train-iters",
    "training.lr": "--lr",
}
_WITHOUT_FLAGS: JsonMapping = {
    "training.lr_decay_style": "constant",  # of scripts in diffusers' manner; Megatron's default is filled before
    "training.lr_warmup_ratio": 0.0,
    "training.save_total_limit": None,
    "features.enable_chunk_loss": False,
    "features.compile": False,
    "features.fused_kernels": False,
}
"""Keys whose defaults in a YAML are not those of launch scripts: no warm-up, every checkpoint kept, no
kernels but those that a flag asks for."""


@dataclass(frozen=True)
class Translated:
    """What a command line of flags means."""

    config: ResolvedConfig
    """The configuration, with the flag or the file's line that gave each value as its origin."""
    model_json: JsonObject
    """The file of `--mm-model` as it stands; empty without one."""
    data_json: JsonObject
    """The file of `--mm-data`."""
    tools_json: JsonObject
    """The file of `--mm-tool`."""
    notes: tuple[str, ...]
    """What was given and has no effect here, and why; each reason once."""

    @property
    def arguments(self) -> Arguments:
        """The checked configuration as `Arguments`, the same object as `config.arguments`."""
        return self.config.arguments


def from_flags(argv: Sequence[str], environment: Mapping[str, str]) -> ResolvedConfig:
    """The configuration that a command line of flags stands for.

    Args:
        argv: The words behind the entry's name.
        environment: `WORLD_SIZE` of the process, on which the number of accumulated micro-batches depends.

    Raises:
        UsageError: Words that cannot be read.
        ConfigError: Every problem of flags and files.
    """
    return translate(parse(argv, environment)).config


def translate(
    namespace: Namespace,
    plugin_keys: PluginKeys | None = None,
    *,
    for_training: bool = True,
    reads_data: bool = False,
) -> Translated:
    """The configuration that a namespace of flags stands for.

    Args:
        namespace: As `mindspeed_mm.arguments.parse_args` returns it.
        plugin_keys: Keys that imported plugins declared; see `load_config`.
        for_training: Ask for what every training needs: `--lr`, `--train-iters`, `--micro-batch-size`.
        reads_data: Ask for the data, too: the entry has none of its own.

    Raises:
        ConfigError: Every problem of flags and files at once, each with its flag or its file and line.
    """
    reading = Reading(namespace)
    _put_flags(reading)
    model_json, data_json, tools_json = _put_files(reading)
    # after all files: rules read what files have put
    for rule in RULES:
        rule(reading)
    _drop_unread(reading)
    _fill_defaults(reading)
    if for_training:
        _check_required(reading)
        if reads_data:
            _check_data(reading)
    config = _checked(reading, plugin_keys)
    return Translated(config, model_json, data_json, tools_json, (*_idle_notes(reading), *reading.draft.notes))


def _put_flags(reading: Reading) -> None:
    """Flags that are keys, and those that are errors."""
    for dest, place in reading.given.places.items():
        flag = by_dest().get(dest)
        if flag is None:
            continue
        if flag.key:
            reading.draft.put(flag.key, reading.value(dest), place)
        elif flag.refused:
            reading.draft.problem(f"is not built: {flag.refused}", place, "Leave it out.")


def _put_files(reading: Reading) -> tuple[JsonObject, JsonObject, JsonObject]:
    """Read the files; data first, which may name the model's folder."""
    found: dict[str, JsonObject] = {"data": {}, "tools": {}, "model": {}}
    for name, dest, put in (
        ("data", "mm_data", put_data),
        ("tools", "mm_tool", _put_tools),
        ("model", "mm_model", put_model),
    ):
        root = _root(reading, name, dest)
        if root is not None:
            found[name] = plain(root)
            # a file with problems does not keep the others from being read
            _attempt(reading, put, root)
    return found["model"], found["data"], found["tools"]


def _root(reading: Reading, name: str, dest: str) -> Node | None:
    path, section = reading.value(dest), reading.given.sections.get(name)
    if path is not None and section is not None:
        what = f"'{path}', but {section.place} holds the section {name}"
        reading.draft.problem(what, reading.place(dest), "Keep one of them.")
    if section is not None:
        if isinstance(section.value, dict):
            return clone(section)
        return None
    if path is None:
        return None
    try:
        return read_json_tree(Path(path))
    except ConfigError as error:
        reading.draft.problems += error.problems
        return None


def _attempt(reading: Reading, put: Callable[[Reading, Node], None], root: Node) -> None:
    try:
        put(reading, clone(root))
    except MMError as error:
        reading.draft.problems += error.problems


def _drop_unread(reading: Reading) -> None:
    """Flags of another optimizer, or of another schedule: Megatron accepts them, and a configuration does not."""
    draft = reading.draft
    for key, why in unread_of_training(draft.value):
        entry = take(draft.root, key)
        if entry is not None:
            draft.note(f"{entry.node.place} has no effect: {why}.")


def _fill_defaults(reading: Reading) -> None:
    """What Megatron takes where a flag is absent, if that is not what is taken here. Scripts in diffusers' manner, with
    `--learning_rate`, are none of Megatron's, but share what neither has a default for."""
    for key, value in _WITHOUT_FLAGS.items():
        if not reading.draft.has(key):
            reading.draft.fill(key, value, "what launch scripts do without a flag")
    if reading.has("learning_rate"):
        return
    ours = Arguments()
    for flag in FLAGS:
        if flag.key and flag.default not in (None, False) and value_at(ours, flag.key) != flag.default:
            reading.draft.fill(flag.key, flag.default, f"Megatron's default of --{flag.name}")
    if reading.draft.value("training.save_interval") is None:
        reading.draft.fill("training.save_interval", 0, "Megatron's default of --save-interval")


def _check_required(reading: Reading) -> None:
    for key, flag in _REQUIRED.items():
        if reading.draft.value(key) is None:
            reading.draft.problem("is not given", flag, "Add it.")


def _check_data(reading: Reading) -> None:
    """Rows or features are named, in whatever way."""
    is_set = any(str(word).startswith("data.") for word in reading.value("mm_set", ()))
    has_file = reading.has("mm_data") or "data" in reading.given.sections
    rows = [reading.draft.value(f"data.dataset_param.basic_parameters.{name}") for name in ("dataset", "features_dir")]
    if not (is_set or has_file or any(rows)):
        reading.draft.problem(
            "is not given: there is nothing to train on", "--mm-data", "Name the file of the rows, e.g. data.json."
        )


def _checked(reading: Reading, plugin_keys: PluginKeys | None) -> ResolvedConfig:
    """The tree as a configuration; its problems together with those of the flags."""
    problems: list[Problem] = list(reading.draft.problems)
    config = None
    try:
        config = load_config(reading.draft.root, reading.value("mm_set", ()), plugin_keys=plugin_keys)
    except ConfigError as error:
        problems += error.problems
    if config is None or problems:
        raise ConfigError(f"{FROM_FLAGS}: {count_of(problems)}", problems=list(dict.fromkeys(problems)))
    return config


def _idle_notes(reading: Reading) -> list[str]:
    """Flags without effect, those of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for dest in reading.given.places:
        flag = by_dest().get(dest)
        if flag is not None and flag.idle:
            by_reason.setdefault(flag.idle, []).append(f"--{flag.name}")
    notes = []
    for reason, names in by_reason.items():
        have = "has" if len(names) == 1 else "have"
        notes.append(f"{', '.join(names)} {have} no effect: {reason}.")
    return notes


def _put_tools(reading: Reading, root: Node) -> None:
    """Put the profilers' settings; `sorafeature` is for the command that extracts features."""
    sections = {name: entry for name, entry in root.value.items() if name != "sorafeature"}
    if sections:
        reading.draft.put_node("tools", Node(sections, root.place))
