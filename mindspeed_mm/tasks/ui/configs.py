"""Configurations below the board's folder: read without secrets, checked, written whole, and held to the folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.errors import ConfigError, MMError, UsageError
from mindspeed_mm.core.redaction import REDACTED
from mindspeed_mm.fsdp.params.loader import given_value
from mindspeed_mm.fsdp.params.yaml.config_text import MOST_BYTES, read_config_text
from mindspeed_mm.fsdp.params.yaml.hidden_text import yaml_without_secrets
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.fsdp.params.yaml.paths import INPUT_PATHS, OUTPUT_PATHS
from mindspeed_mm.tasks.check import check
from mindspeed_mm.tasks.ui.files import inside, read_head

Finding = dict[str, str]
"""`what`, `where`, `key` and `way_out` of a problem."""


def read(root: Path, name: object) -> str:
    """The text of a configuration, its secrets hidden.

    Raises:
        MMError: It is not there, or is none.
    """
    path = inside(root, name)
    if not path.exists():
        raise UsageError(f"there is no file '{name}' any more", key="name", way_out="Choose another.")
    return yaml_without_secrets(read_config_text(path))


def read_of_run(path: Path) -> str:
    """The configuration that a run was started with, its secrets hidden.

    Raises:
        ConfigError: The run keeps none.
    """
    try:
        content = read_head(path / "config.yaml", MOST_BYTES)
    except OSError as error:
        raise ConfigError("the run keeps no configuration", where=path.name) from error
    return yaml_without_secrets(content.decode("utf-8", "replace"))


def check_text(text: str, name: str) -> list[Finding]:
    """What `mm check --config-only` finds in a text; no plugin is imported, and no file is opened."""
    try:
        root = parse_yaml(text, name).root
    except ConfigError as error:
        return _findings(error)
    result = check.run(root, config_only=True)
    return [_finding(problem) for problem in result.problems]


def save(root: Path, name: object, text: str, *, replace: bool) -> Path:
    """Write a configuration whole, or not at all.

    Args:
        root: The board's folder.
        name: Of the file, below the folder.
        text: What it is to hold.
        replace: Whether a file of this name may be replaced.

    Raises:
        UsageError: The name cannot be used, the file is there already, or the text holds hidden secrets.
        ConfigError: The text is not YAML.
    """
    path = inside(root, name)
    if len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        raise UsageError(f"a configuration has at most {MOST_BYTES:,} bytes", key="text")
    if REDACTED in text:
        way_out = "Name an environment variable instead, by api_key_env, or edit the file itself."
        raise UsageError(f"the text holds {REDACTED}, which stands for a secret that is not shown", way_out=way_out)
    if not isinstance(parse_yaml(text, str(name)).root.value, dict):
        raise ConfigError("holds no sections", where=str(name), way_out="Begin with a section, such as 'model:'.")
    if os.path.lexists(path) and not (replace and path.is_file()):
        raise UsageError(f"'{name}' exists already", key="name", way_out="Tick 'replace', or choose another name.")
    atomic_write_text(path, text if text.endswith("\n") else f"{text}\n")
    return path


def check_stays_inside(root: Path, config: Path) -> None:
    """Raise unless everything that a run of this configuration writes lies below the folder.

    Raises:
        ConfigError: The file cannot be read as YAML.
        UsageError: It has no run folder, or a path leads elsewhere.
    """
    if given_value(config, (), "training.save") is None:
        what = "is not set, and the board follows runs that keep a folder"
        raise UsageError(what, where=config.name, key="training.save", way_out="Set it, such as runs/first.")
    _check_paths(root, config, OUTPUT_PATHS, (root,), "Only what lies below it is written from the board.")


def check_shows_inside(root: Path, config: Path, also: Sequence[Path]) -> None:
    """Raise unless the rows and media that a preview would show lie below the folder, or below another that the board
    may show.

    Raises:
        ConfigError: The file cannot be read as YAML.
        UsageError: A path leads elsewhere.
    """
    keys = [key for key in INPUT_PATHS if key.startswith("data.")]
    way_out = "Name the folder when the board is started: mm ui FOLDER --also DATA_FOLDER."
    _check_paths(root, config, keys, (root, *also), way_out)


def _check_paths(root: Path, config: Path, keys: Sequence[str], allowed: Sequence[Path], way_out: str) -> None:
    for key in keys:
        for text in _texts(given_value(config, (), key)):
            for base in {root, config.parent}:  # where a relative path may start
                target = (base / Path(text).expanduser()).resolve()
                if not any(target.is_relative_to(folder) for folder in allowed):
                    what = f"'{text}' is outside of {root}"
                    raise UsageError(what, where=config.name, key=key, way_out=way_out)


def _texts(value: object) -> Iterator[str]:
    """Every text in a value; several paths of one text stand between commas."""
    if isinstance(value, str):
        yield from (part.strip() for part in value.split(",") if part.strip())
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _findings(error: MMError) -> list[Finding]:
    return [_finding(problem) for problem in error.problems]


def _finding(problem: Any) -> Finding:
    return {"what": problem.what, "where": problem.where, "key": problem.key, "way_out": problem.way_out}
