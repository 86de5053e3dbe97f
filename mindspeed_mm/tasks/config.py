"""`mm config`: the configuration as a run would see it, with the origin of each value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.params.loader import ResolvedConfig, dump_resolved, load_config, resolved_dict
from mindspeed_mm.fsdp.params.rules.path import missing_inputs
from mindspeed_mm.provider.entry_script import notes_on_entry, reads_mm_data
from mindspeed_mm.provider.launch import read_launch
from mindspeed_mm.provider.parse import parse
from mindspeed_mm.provider.translate import Translated, translate


def run(config_path: Path, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """Read and check a configuration without importing plugins.

    Raises:
        ConfigError: Every problem of the file.
    """
    return load_config(config_path, overrides)


def run_flags(words: Sequence[str], environment: Mapping[str, str]) -> Translated:
    """The configuration that flags stand for, or a launch script, or a YAML with `gpt_args`.

    Args:
        words: Flags; a script or YAML may stand before them, or a command with its entry.
        environment: `WORLD_SIZE`, and values of variables that a script does not set.

    Raises:
        UsageError: Words that cannot be read.
        ConfigError: Every problem of flags and files.
    """
    launch = read_launch(words, environment)
    namespace = parse(launch.flags, environment)
    translated = translate(namespace, for_training=launch.trains, reads_data=reads_mm_data(launch.path))
    on_script = (*launch.notes, *notes_on_entry(launch.path, has_runner=launch.has_runner))
    return replace(translated, notes=(*translated.notes, *on_script))


def notes_on_inputs(config: ResolvedConfig) -> list[str]:
    """Folders and files that a launch names and that are not on this machine, where a run may not be meant to be."""
    notes: list[str] = []
    for error in missing_inputs(config.arguments):
        notes += map(str, config.locate(error.problems))
    return notes


def as_text(config: ResolvedConfig, only_given: bool = False) -> str:
    """YAML with origins; optionally without the values that are defaults."""
    text = dump_resolved(config)
    if only_given:
        return _without_defaults(text)
    return text


def as_dict(config: ResolvedConfig) -> JsonObject:
    """For machines: the configuration, the origins, and what was noticed."""
    return {
        "config": resolved_dict(config),
        "origins": {key: str(origin) for key, origin in config.origins.items()},
        "warnings": list(config.warnings),
        "unchecked": list(config.unchecked),
    }


def _without_defaults(text: str) -> str:
    """Drop default values, then the sections that hold nothing any more."""
    kept: list[str] = []
    for line in reversed([line for line in text.splitlines() if not line.endswith(("  # default", "  # card"))]):
        is_section = line.rstrip().endswith(":")
        if not is_section or (kept and _indent(kept[-1]) > _indent(line)):
            kept.append(line)
    return "\n".join([*reversed(kept), ""])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
