"""Objects of a caller in Python in place of files: rows, data sets and models in memory, and the overrides that name
what was stored of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeAlias

from mindspeed_mm.core.errors import ConfigError, UsageError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.core.run_ownership import check_run_folder, mark_run_folder
from mindspeed_mm.fsdp.params.loader import given_value
from mindspeed_mm.fsdp.train.trainer import GivenObjects
from mindspeed_mm.tasks.given.rows import is_in_memory, listed_rows, named_path, write_rows

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    Processor: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin

Word: TypeAlias = str | JsonMapping
"""An override: `section.key=value`, or a mapping of sections."""

_BASIC = "data.dataset_param.basic_parameters"
_IN_MEMORY = "(given in Python)"


def with_objects(
    given: Path | Mapping[str, object],
    words: Sequence[Word],
    module: nn.Module | None,
    rows: tuple[object, object],
    processor: Processor | None,
    stack: ExitStack,
    *,
    keeps: bool = True,
) -> tuple[list[Word], GivenObjects]:
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
    folder = _folder_for_objects(given if keeps else {}, words if keeps else (), stack)
    objects = GivenObjects(model=module)
    words = list(words)
    own_sets = [is_data_set(one) for one in rows if one is not None]
    if not any(own_sets):
        named = {key: given_value(given, words, f"{_BASIC}.{key}") for key in ("dataset_dir", "media_roots")}
        words.insert(0, _row_files(rows, folder, named))
    elif all(own_sets):
        train_set, validation_set = rows
        objects = replace(objects, train_set=train_set, validation_set=validation_set)
        if validation_set is not None:
            words.insert(0, _of_basic(val_dataset=_IN_MEMORY, val_rate=None))
    else:
        raise UsageError("is of another kind than rows", key="val_rows", way_out="Give both as rows, or as data sets.")
    if module is not None:
        words.insert(0, _folder_of(module, processor, folder, given, words, reads_rows=not any(own_sets)))
    return words, objects


def _folder_for_objects(
    given: Path | Mapping[str, object], words: Sequence[Word], stack: ExitStack
) -> Callable[[], Path]:
    """Where objects are stored that a run reads: in its folder, or, where it keeps nothing, for its length."""

    @cache
    def folder() -> Path:
        save = given_value(given, words, "training.save")
        if not save:
            return Path(stack.enter_context(TemporaryDirectory(prefix="mm-run-")))
        check_run_folder(Path(save), given if isinstance(given, Path) else None)
        mark_run_folder(Path(save))  # before anything is put there
        return Path(save)

    return folder


def is_data_set(rows: object) -> bool:
    """Whether rows are a data set of the caller's own, with samples and a way to collate them."""
    return hasattr(rows, "collate_fn") or hasattr(rows, "build_collator")


def _row_files(rows: tuple[object, object], folder: Callable[[], Path], named: JsonMapping) -> JsonObject:
    """What names the files of rows for training and for validation; those in memory are stored. Their media start at
    the `dataset_dir` that is named, else at the working directory."""
    values: JsonObject = {}
    files: list[Path] = []
    train, validation = rows
    if train is not None:
        files.append(_row_file(train, "rows", "train", folder))
        values["dataset"] = str(files[-1])
    if validation is not None:
        files.append(_row_file(validation, "val_rows", "validation", folder))
        values |= {"val_dataset": str(files[-1]), "val_rate": None}
    if any(file.parent == folder() / "rows" for file in files):  # they were objects
        given = named["media_roots"] or ()
        roots = [*([given] if isinstance(given, str) else given), str(folder().resolve() / "rows")]
        if named["dataset_dir"] is None:
            values["dataset_dir"] = str(Path.cwd())
        values["media_roots"] = [*roots, str(Path.cwd())] if named["dataset_dir"] is None else roots
    if values:
        return _of_basic(**values)
    return {}


def _row_file(rows: object, argument: str, name: str, folder: Callable[[], Path]) -> Path:
    if is_in_memory(rows):
        return write_rows(listed_rows(rows, name), folder() / "rows", name)
    return named_path(rows, argument)


def _of_basic(**values: object) -> JsonObject:
    """Values of `basic_parameters` as an override."""
    return {"data": {"dataset_param": {"basic_parameters": values}}}


def _folder_of(
    module: nn.Module,
    processor: Processor | None,
    folder: Callable[[], Path],
    given: Path | Mapping[str, object],
    words: Sequence[Word],
    *,
    reads_rows: bool,
) -> JsonObject:
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
    origin = _origin(module)
    if processor is None and origin and (Path(origin) / "config.json").is_file():
        return {"model": {"model_name_or_path": str(Path(origin))}}
    save_model = getattr(module, "save_pretrained", None)
    if save_model is None or (processor is None and not reads_rows):
        return {}
    if processor is None:
        raise ConfigError(
            "the model object has no folder to take its processor from",
            key="processor",
            way_out="Give its processor or tokenizer, or model.model_name_or_path in the configuration.",
        )
    target = folder() / "model"
    if int(os.environ.get("RANK", "0")) == 0 and not (target / "config.json").exists():
        save_model(target)
        processor.save_pretrained(target)
    return {"model": {"model_name_or_path": str(target)}}


def _origin(module: nn.Module) -> str:
    """The folder or name that a model of transformers or diffusers was loaded from; nothing where none is noted."""
    name = str(getattr(getattr(module, "config", None), "_name_or_path", "") or "")
    if "\0" in name:
        return ""
    return name
