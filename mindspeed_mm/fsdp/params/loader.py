"""From a YAML file, or a mapping in Python, and overrides to a checked configuration, with the origin of every value.

Priority: overrides, then the file, then the defaults. All problems of a file are reported at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mindspeed_mm.core.config_path import steps_of
from mindspeed_mm.core.errors import ConfigError, ExitCode, MMError, Problem, count_problems
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.redaction import REDACTED, redact, remember_secrets
from mindspeed_mm.fsdp.params.argument import Arguments, ParallelArguments
from mindspeed_mm.fsdp.params.cards import PluginKeys
from mindspeed_mm.fsdp.params.rules.all import check_cross_section
from mindspeed_mm.fsdp.params.rules.plan import memory_notes
from mindspeed_mm.fsdp.params.rules.unbuilt import unbuilt_features
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.fsdp.params.yaml.config_text import read_config_text
from mindspeed_mm.fsdp.params.yaml.generator_files import derive_expert_levels, settle_generator_files
from mindspeed_mm.fsdp.params.yaml.key_renames import Notes, settle_keys
from mindspeed_mm.fsdp.params.yaml.module_names import settle_module_names
from mindspeed_mm.fsdp.params.yaml.origins import Origin, dump_with_origins, leaves
from mindspeed_mm.fsdp.params.yaml.overrides import (
    ARGUMENTS,
    COMMAND_LINE,
    CONFIGURATION,
    NOT_FILES,
    override_of,
    parse_override,
    put_over,
    to_plain,
)
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.fsdp.params.yaml.paths import derive_processor_folder, locate_paths, read_token_files
from mindspeed_mm.fsdp.params.yaml.speech_files import check_speech_sizes, settle_speech_files
from mindspeed_mm.fsdp.params.yaml.tree import (
    Node,
    SourcePosition,
    as_node,
    clone,
    find,
    place_of,
    plain,
    text_at,
    value_at_key,
)
from mindspeed_mm.fsdp.params.yaml.unknown_keys import build_scope, check_ids, fill_declared, judge_keys, own_model_keys
from mindspeed_mm.fsdp.params.yaml.value_messages import problems_of

__all__ = [
    "Given",
    "Override",
    "PluginKeys",
    "ResolvedConfig",
    "dump_resolved",
    "given_value",
    "load_config",
    "read_plugins",
    "resolved_dict",
]


Given = Path | Mapping[str, Any] | Node
"""A configuration: a YAML file, its sections as a mapping, or a tree whose values know where they were written. Paths
in the latter two start in the working directory."""
Override = str | Mapping[str, Any]
"""What wins over a configuration: `section.key=value`, or sections as a mapping."""


_HIDDEN = re.compile(rf'"{REDACTED}"|[/ =]{REDACTED}')
"""A value, or a part of one, that was hidden."""
_BEHIND_ALL_LINES = 1 << 30
_FLAGS = "gpt_args"
"""Section of a file that the flags door reads."""
_BEFORE_TRAINING = (ExitCode.USAGE, ExitCode.ENVIRONMENT, ExitCode.DATA)
"""How a run ends that could not begin."""


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration that has been checked."""

    arguments: Arguments
    path: Path
    """The file; of a mapping the word `configuration`, which names no file."""
    text: str
    """The file as it is on disk; a mapping as YAML."""
    origins: dict[str, Origin]
    """Dotted key of every value → where it came from."""
    warnings: tuple[str, ...]
    """What was accepted but should be written otherwise."""
    unchecked: tuple[str, ...]
    """Keys that only a plugin can judge that was not imported."""

    def locate(self, problems: Iterable[Problem]) -> list[Problem]:
        """The problems with file and line of their key, where the file has it."""
        return [replace(problem, where=problem.where or self._where(problem.key)) for problem in problems]

    def check_built(self) -> None:
        """Raise one `ConfigError` that names every key whose feature this version does not have yet."""
        problems = self.locate(unbuilt_features(self.arguments))
        if problems:
            raise ConfigError(f"{len(problems)} of the requested features are not in this version", problems=problems)

    def check_revealed(self) -> None:
        """Raise one `ConfigError` that names every value that was hidden when a run was recorded: `resolved.yaml` and
        `config.yaml` of a run hold no secrets."""
        problems = []
        for key, value in leaves(self.arguments.to_dict()):
            if _HIDDEN.search(json.dumps(value, ensure_ascii=False, default=str)):
                what = "a secret was hidden here when the run was recorded"
                way_out = "Give it again in the YAML or on the command line; or, of a server, name api_key_env."
                problems.append(Problem(what, key=key, way_out=way_out))
        if problems:
            found = self.locate(problems)
            raise ConfigError(count_problems(self.path, found), problems=found)

    @contextmanager
    def told_as_own(self) -> Iterator[None]:
        """What passes through here and speaks of the configuration is told as the loader tells it: under the file's
        name, each problem with the place that its value comes from."""
        try:
            yield
        except MMError as error:
            problems = self.locate(error.problems)
            is_about_it = len(problems) == 1 and self._has(problems[0].key) and error.exit_code in _BEFORE_TRAINING
            if isinstance(error, ConfigError) or (is_about_it and not error.headline):
                error.retell(count_problems(self.path, problems), problems)
            elif error.headline:
                error.retell(error.headline, problems)
            raise

    def _has(self, key: str) -> bool:
        """Whether it is a key of the configuration, or several, or a section's."""
        return any(map(self._at, key.split(" · ")))

    def _where(self, key: str) -> str:
        """Where a key's value comes from; of a section, or of several keys, the first that was given."""
        for each in key.split(" · "):
            for origin in self._at(each):
                if origin.kind in ("yaml", "python", COMMAND_LINE):
                    return origin.where or COMMAND_LINE
        return ""

    def _at(self, key: str) -> list[Origin]:
        """The origin of a key's value; of a section, of all that is in it; none where there is no such key. What is in
        an entry of a list, such as `posttrain.rewards[0].settings.url`, has the origin of the list."""
        key = key.partition("[")[0]
        if key in self.origins:
            return [self.origins[key]]
        if not key:
            return []
        return [origin for own, origin in self.origins.items() if own.startswith(f"{key}.")]


def load_config(
    given: Given,
    overrides: Sequence[Override] = (),
    *,
    plugin_keys: PluginKeys | None = None,
    ranks: int | None = None,
) -> ResolvedConfig:
    """Read, check and resolve a configuration.

    Args:
        given: YAML file, or a mapping of sections.
        overrides: `section.key=value`, each value parsed as YAML; or mappings of sections.
        plugin_keys: Keys that imported plugins declared. Without them the keys of an outside plugin are listed as
            unchecked.
        ranks: Of the job, where they are known. A configuration that breaks other rules also says whether its parallel
            sizes fit them; one that breaks none is left to `resolve_parallel_sizes`.

    Raises:
        ConfigError: Every problem of the file and of the overrides, each with its place.
    """
    path = _path_of(given)
    text, root, notes = _read(given, overrides, plugin_keys)
    settle_module_names(root)
    notes.problems += locate_paths(root, path)
    notes.problems += read_token_files(root)
    notes.problems += check_speech_sizes(root)
    derive_processor_folder(root)
    derive_expert_levels(root)
    scope = build_scope(root, plugin_keys)
    notes.problems += check_ids(root, plugin_keys)
    findings = judge_keys(root, scope)
    notes.problems += findings.problems
    card_defaults = fill_declared(root, scope)
    arguments = _validate(root, notes)
    if arguments is None or notes.problems:
        if arguments is not None and ranks:
            notes.problems += _problems_of_sizes(arguments.parallel, ranks, root)
        once = {_identity(problem): problem for problem in reversed(notes.problems)}
        ordered = sorted(once.values(), key=_by_line)
        raise ConfigError(count_problems(path, ordered), problems=ordered)
    return ResolvedConfig(
        arguments=arguments,
        path=path,
        text=text,
        origins=_origins(arguments, root, card_defaults),
        warnings=tuple(map(str, notes.warnings)),
        unchecked=tuple(findings.unchecked),
    )


def read_plugins(given: Given, overrides: Sequence[Override] = ()) -> tuple[list[str], str | None, str | None]:
    """`training.plugin`, `model.model_id` and the dataset type, so that plugins can be imported before all is checked.

    Raises:
        ConfigError: The file is not readable as YAML.
    """
    _, root, _ = _read(given, overrides, None)
    plugins = value_at_key(root, "training.plugin")
    if isinstance(plugins, str):
        plugins = [plugins]
    names: list[str] = []
    if isinstance(plugins, list):
        names = [name for name in plugins if isinstance(name, str)]
    return names, text_at(root, "model.model_id"), text_at(root, "data.dataset_param.dataset_type")


def given_value(given: Given, overrides: Sequence[Override], key: str) -> Any:
    """The value that a configuration, which need not be whole, gives for a dotted key; None when it gives none.

    Raises:
        ConfigError: The file is not readable as YAML.
    """
    return value_at_key(_read(given, overrides, None)[1], key)


def resolved_dict(config: ResolvedConfig) -> JsonObject:
    """The whole configuration as plain values, without secrets."""
    values: JsonObject = redact(config.arguments.to_dict())
    return values


def dump_resolved(config: ResolvedConfig) -> str:
    """The whole configuration as YAML, without secrets; the origin of each value is a comment beside it."""
    return dump_with_origins(resolved_dict(config), config.origins)


def _path_of(given: Given) -> Path:
    """What a configuration is called in messages: its file, or a name that stands for one."""
    if isinstance(given, Path):
        return given
    if isinstance(given, Node):
        return Path(given.place.source)
    return Path(CONFIGURATION)


def _read(given: Given, overrides: Sequence[Override], plugin_keys: PluginKeys | None) -> tuple[str, Node, Notes]:
    """The file's text, and its tree with the overrides in it, every key under the name that it has here."""
    text, root, problems = _parsed(given)
    notes = Notes(problems=problems)
    if not isinstance(root.value, dict):
        what = "the file is empty" if root.value is None else "the file does not hold sections"
        raise ConfigError(what, where=str(root.place), way_out="It begins with 'model:', 'data:', 'training:' …")
    if _FLAGS in root.value:
        raise ConfigError(
            "the file holds flags of MindSpeed-MM's Megatron backend",
            where=str(root.value[_FLAGS].key),
            key=_FLAGS,
            way_out="Train by its entry: torchrun pretrain_transformers.py FILE, or write it as a configuration: "
            "mm config --from-flags FILE.",
        )
    own_keys = own_model_keys(root, plugin_keys)
    settle_keys(root, notes, own_keys)
    for override in overrides:
        extra = parse_override(override, notes) if isinstance(override, str) else override_of(override)
        if extra is not None:
            settle_keys(extra, notes, own_keys)
            put_over(root, extra, notes)
    settle_generator_files(root, notes)
    settle_speech_files(root, notes)
    remember_secrets(plain(root))
    return text, root, notes


def _parsed(given: Given) -> tuple[str, Node, list[Problem]]:
    """The text, its tree, and what is wrong with the text."""
    if isinstance(given, Path):
        text = read_config_text(given)
        document = parse_yaml(text, str(given))
        return text, document.root, document.problems
    if isinstance(given, Node):
        return dump_with_origins(plain(given), {}), clone(given), []
    sections = to_plain(given)
    return dump_with_origins(sections, {}), as_node(sections, SourcePosition(CONFIGURATION)), []


def _validate(root: Node, notes: Notes) -> Arguments | None:
    """The typed tree, or None with what is wrong in `notes`."""
    try:
        arguments = Arguments.model_validate(plain(root))
    except ValidationError as error:
        notes.problems += problems_of(error, root)
        return None
    for problem in check_cross_section(arguments):
        notes.problems.append(replace(problem, where=problem.where or _where(root, problem.key)))
    notes.warnings += _warn_meaningless(root)
    for note in memory_notes(arguments.data, arguments.training, arguments.features):
        notes.warnings.append(replace(note, where=_where(root, note.key)))
    return arguments


def _problems_of_sizes(parallel: ParallelArguments, ranks: int, root: Node) -> list[Problem]:
    try:
        resolve_parallel_sizes(parallel, ranks)
    except ConfigError as error:
        return [replace(each, where=_where(root, each.key.split(" · ")[0])) for each in error.problems]
    return []


def _where(root: Node, key: str) -> str:
    """Where a key, which may name an entry of a list, is given; nowhere when it has its default."""
    holder = key.partition("[")[0]
    if find(root, holder) is None:
        return ""
    return str(place_of(root, steps_of(key)))


def _warn_meaningless(root: Node) -> list[Problem]:
    warnings = []
    for media in ("image", "video"):
        entry = find(root, f"data.dataset_param.preprocess_parameters.{media}_resolution")
        if entry is not None and entry.node.value is not None:
            key = f"data.dataset_param.preprocess_parameters.{media}_resolution"
            way_out = f"{media}_max_pixels limits the size."
            warnings.append(Problem("has no effect here and is ignored", str(entry.key), key, way_out))
    key = "training.train_iters"
    if value_at_key(root, key) is not None and value_at_key(root, "training.train_epochs") is not None:
        what = "training.train_epochs is also given and takes precedence"
        warnings.append(Problem(what, _where(root, key), key, "Keep one of them."))
    return warnings


def _identity(problem: Problem) -> tuple[str, str, str]:
    """A line of the file may be found wrong under several keys; outside of files keys have no other place."""
    key = problem.key if problem.where in ("", *NOT_FILES) else ""
    return problem.where, problem.what, key


def _by_line(problem: Problem) -> tuple[int, int]:
    _, *numbers = problem.where.rsplit(":", 2)
    if len(numbers) == 2 and all(map(str.isdigit, numbers)):
        return int(numbers[0]), int(numbers[1])
    return _BEHIND_ALL_LINES, 0


def _origins(arguments: Arguments, root: Node, card_defaults: set[str]) -> dict[str, Origin]:
    return {key: _origin_of_key(key, root, card_defaults) for key, _ in leaves(arguments.to_dict())}


def _origin_of_key(key: str, root: Node, card_defaults: set[str]) -> Origin:
    entry = find(root, key)
    if key in card_defaults:
        return Origin("card")
    if entry is None:
        return Origin("default")
    place = entry.node.place
    if place.source == COMMAND_LINE:
        return Origin("command line")
    if place.source in (ARGUMENTS, CONFIGURATION):
        return Origin("python", place.source)
    if place.source.startswith("derived: "):
        return Origin("derived", place.source.removeprefix("derived: "))
    return Origin("yaml", str(place))
