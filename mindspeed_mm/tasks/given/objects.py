"""Objects of a caller in Python in place of files: rows, data sets and models in memory, and the overrides that name
what was stored of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mindspeed_mm.core.errors import ConfigError, UsageError
from mindspeed_mm.core.run_ownership import check_run_folder, mark_run_folder
from mindspeed_mm.fsdp.params.loader import given_value
from mindspeed_mm.fsdp.train.trainer import GivenObjects
from mindspeed_mm.tasks.given.rows import listed_rows, named_path, write_rows

_BASIC = ("data", "dataset_param", "basic_parameters")
_IN_MEMORY = "(given in Python)"


def with_objects(
    given: Path | Mapping[str, Any],
    words: list[Any],
    module: Any,
    rows: tuple[Any, Any],
    processor: Any,
    stack: ExitStack,
    *,
    keeps: bool = True,
) -> tuple[list[Any], GivenObjects]:
    """The overrides that name what was stored of objects, before those that are there, and what stays an object.

    Args:
        given: The configuration.
        words: The caller's overrides, which win.
        module: The model object, if any.
        rows: For training and for validation.
        processor: Of the model object.
        stack: Ends with the run.
        keeps: Objects are stored in the run's folder; False: in one that goes away with `stack`.

    Raises:
        UsageError: Training rows and validation rows are of two kinds.
    """
    own_sets = [is_data_set(one) for one in rows if one is not None]
    if any(own_sets) and not all(own_sets):
        raise UsageError("is of another kind than rows", key="val_rows", way_out="Give both as rows, or as data sets.")
    folder = _folder_for_objects(given if keeps else {}, words if keeps else (), stack)
    train_set, validation_set = rows if any(own_sets) else (None, None)
    train_file, validation_file = (None, None) if any(own_sets) else _row_paths(rows, folder)
    words = [_row_files(train_file, validation_file, folder), *words]
    if validation_set is not None:
        words = [_nested(_BASIC, {"val_dataset": _IN_MEMORY, "val_rate": None}), *words]
    if module is not None:
        words = [_folder_of(module, processor, folder, given, words, reads_rows=not any(own_sets)), *words]
    return words, GivenObjects(model=module, train_set=train_set, validation_set=validation_set)


def _folder_for_objects(given: Path | Mapping[str, Any], words: Sequence[Any], stack: ExitStack) -> Callable[[], Path]:
    """Where objects are stored that a run reads: in its folder, or, where it keeps nothing, for its length."""
    made: list[Path] = []

    def folder() -> Path:
        if not made:
            save = given_value(given, words, "training.save")
            if save:
                check_run_folder(Path(save), given if isinstance(given, Path) else None)
                mark_run_folder(Path(save))  # before anything is put there
            made.append(Path(save) if save else Path(stack.enter_context(TemporaryDirectory(prefix="mm-run-"))))
        return made[0]

    return folder


def is_data_set(rows: Any) -> bool:
    """Whether rows are a data set of the caller's own, with samples and a way to collate them."""
    return hasattr(rows, "collate_fn") or hasattr(rows, "build_collator")


def _row_paths(rows: tuple[Any, Any], folder: Callable[[], Path]) -> tuple[Path | None, Path | None]:
    """The files of rows for training and for validation; those in memory are stored."""

    def path_of(one: Any, name: str) -> Path | None:
        if one is None or isinstance(one, str | os.PathLike):
            return None if one is None else named_path(one, "rows" if name == "train" else "val_rows")
        return write_rows(listed_rows(one, name), folder() / "rows", name)

    return path_of(rows[0], "train"), path_of(rows[1], "validation")


def _row_files(train: Path | None, validation: Path | None, folder: Callable[[], Path]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if train is not None:
        values["dataset"] = str(train)
    if validation is not None:
        values |= {"val_dataset": str(validation), "val_rate": None}
    if any(file is not None and file.parent == folder() / "rows" for file in (train, validation)):  # they were objects
        roots = [str(Path.cwd()), str(folder().resolve() / "rows")]
        values |= {"dataset_dir": str(Path.cwd()), "media_roots": roots}
    return _nested(_BASIC, values) if values else {}


def _nested(names: Sequence[str], values: dict[str, Any]) -> dict[str, Any]:
    for name in reversed(names):
        values = {name: values}
    return values


def _folder_of(
    module: Any,
    processor: Any,
    folder: Callable[[], Path],
    given: Path | Mapping[str, Any],
    words: Sequence[Any],
    *,
    reads_rows: bool,
) -> dict[str, Any]:
    """The folder that stands for a model object: where its configuration and processor are read.

    Raises:
        ConfigError: There is no processor to read rows with; or the run keeps adapters, and a checkpoint of adapters
            does not hold the weights under them, which are known to this process alone.
    """
    if given_value(given, words, "training.save") and given_value(given, words, "training.lora.enable"):
        raise ConfigError(
            "a run that trains adapters saves only the adapters, and the weights of a model object are in no folder",
            key="model",
            way_out="Save it with model.save_pretrained(FOLDER), and pass the folder; or leave training.save out.",
        )
    if given_value(given, words, "model.model_name_or_path"):
        return {}
    origin = Path(str(getattr(getattr(module, "config", None), "_name_or_path", "") or "\0"))
    if processor is None and "\0" not in str(origin) and (origin / "config.json").is_file():
        return {"model": {"model_name_or_path": str(origin)}}
    if not hasattr(module, "save_pretrained") or (processor is None and not reads_rows):
        return {}
    if processor is None:
        raise ConfigError(
            "the model object has no folder to take its processor from",
            key="processor",
            way_out="Give its processor or tokenizer, or model.model_name_or_path in the configuration.",
        )
    target = folder() / "model"
    if int(os.environ.get("RANK", "0")) == 0 and not (target / "config.json").exists():
        module.save_pretrained(target)
        processor.save_pretrained(target)
    return {"model": {"model_name_or_path": str(target)}}
