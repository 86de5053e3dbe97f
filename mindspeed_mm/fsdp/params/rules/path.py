"""What can be said of a configuration's paths without opening what they name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_mm.core.config_path import value_at
from mindspeed_mm.core.errors import CheckpointError, ConfigError, DataError, MachineError, MMError, ModelFolderError
from mindspeed_mm.core.healing import heal_missing
from mindspeed_mm.core.os_errors import with_home
from mindspeed_mm.core.run_ownership import check_run_folder
from mindspeed_mm.core.suggest import where_else
from mindspeed_mm.fsdp.params.argument import Arguments, DataArguments, TrainingArguments

_INPUTS: dict[str, type[MMError]] = {
    "model.model_name_or_path": ModelFolderError,
    "data.dataset_param.preprocess_parameters.model_name_or_path": ModelFolderError,
    "data.dataset_param.basic_parameters.chat_template": DataError,
    "training.evaluate.data": DataError,
    "posttrain.reference.model_name_or_path": ModelFolderError,
    "posttrain.dmd.critic_name_or_path": ModelFolderError,
    "training.load": CheckpointError,
    "training.lora.pretrained_lora_path": CheckpointError,
    "training.lora.frozen_adapters": CheckpointError,
}


def check_paths(arguments: Arguments, config: Path | None = None) -> list[MMError]:
    """Inputs that do not exist, and a run folder that may not be written; `config` is the YAML. Data files are the data
    set's own to find."""
    errors = missing_inputs(arguments)
    for check in _check_outputs(arguments.data, arguments.training, config):
        try:
            check()
        except MMError as error:
            errors.append(error)
    return errors


def missing_inputs(arguments: Arguments, section: str = "") -> list[MMError]:
    """Inputs that do not exist; of those below a section, where one is named."""
    errors: list[MMError] = []
    for key, kind in _INPUTS.items():
        if key.startswith(section):
            errors += _check_input(arguments, key, kind)
    missing_model = [error for error in errors if error.problems[0].key == "model.model_name_or_path"]
    if missing_model:  # the processor's folder follows from it: said once
        errors = [error for error in errors if error.problems[0].what != missing_model[0].problems[0].what]
        errors = missing_model + errors
    return errors


def _check_outputs(
    data: DataArguments, training: TrainingArguments, config: Path | None
) -> Iterator[Callable[[], None]]:
    if training.save:
        yield partial(check_save_folder, Path(training.save), config)
    for name in ("dataset_param", "val_dataset_param"):
        basic: Any = getattr(getattr(data, name), "basic_parameters", None)
        folder = getattr(basic, "cache_dir", None)
        if folder and not basic.preprocess_on_fly:
            yield partial(check_writable, Path(folder), f"data.{name}.basic_parameters.cache_dir")


def check_save_folder(folder: Path, config: Path | None = None) -> None:
    """Raise when a run folder cannot be made or written to, or holds what is not the run's. Makes nothing.

    Args:
        folder: `training.save`.
        config: The YAML that is trained.

    Raises:
        ConfigError: It, or something above it, is a file; or see `check_run_folder`.
        MachineError: The rights to write are missing.
    """
    check_writable(check_run_folder(folder, config), "training.save")


def check_writable(folder: Path, key: str) -> None:
    """Raise `ConfigError` or `MachineError` when a folder that a key names cannot be made or written to. Makes
    nothing."""
    standing = with_home(folder)
    while not standing.exists() and standing != standing.parent:
        standing = standing.parent
    if not standing.is_dir():
        raise ConfigError(f"'{standing}' is a file, not a folder", key=key, way_out="Name another folder.")
    if not os.access(standing, os.W_OK | os.X_OK):
        way_out = "Change its permissions, or name another folder."
        raise MachineError(f"'{standing}' cannot be written to", key=key, way_out=way_out)


def _check_input(arguments: Arguments, key: str, kind: type[MMError]) -> list[MMError]:
    value = value_at(arguments, key)
    paths: Sequence[str] = ()
    if isinstance(value, str):
        paths = [value]
    elif isinstance(value, tuple):
        paths = value
    for path in paths:
        heal_missing(with_home(Path(path)))
    return [missing_input(Path(path), key, kind) for path in paths if not with_home(Path(path)).exists()]


def missing_input(path: Path, key: str, kind: type[MMError]) -> MMError:
    """What is said of an input that is not there: with the name beside it that was meant, if there is one."""
    return kind(f"'{path}' does not exist", key=key, way_out=where_else(path))
