"""Reads a feature set: tensors are mapped from the disk, one map for each shard and process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.data.feature_store.description import Components, Description, check_fits, read_description
from mindspeed_mm.fsdp.data.feature_store.feature_file import (
    DamagedFile,
    FeatureRecord,
    SkippedRow,
    check_file,
    has_checksum,
    read_facts,
    read_tensors,
    tensor_name,
)
from mindspeed_mm.fsdp.data.feature_store.folder import FeatureFolder, count_done, read_index, read_skipped
from mindspeed_mm.fsdp.data.feature_store.legacy import LIST_FILE, LegacyFeatureStore
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter

_KEY = "data.dataset_param.basic_parameters.features_dir"
_MAKE_AGAIN = "Run mm extract again: it finds what is damaged and makes it again."


class FeatureStore(Protocol):
    """Features of rows, whatever the layout."""

    folder: Path

    @property
    def records(self) -> Sequence[FeatureRecord]:
        """In the order of the rows."""

    @property
    def model_folder(self) -> str:
        """Where the encoders were; empty when nobody knows."""

    @property
    def components(self) -> Components | None:
        """The encoders' files as they were; None when nobody knows."""

    @property
    def provenance(self) -> dict[str, dict[str, str]] | None:
        """Component → file → SHA-256, wherever the folder lies; None when nobody knows."""

    @property
    def skipped(self) -> Sequence[SkippedRow] | None:
        """Rows that could not be used; None when nobody knows which rows there were."""

    @property
    def preprocessing(self) -> JsonMapping | None:
        """What decided which pixels were made of a medium; None when nobody knows."""

    @property
    def null_text(self) -> dict[str, torch.Tensor] | None:
        """Features of the empty caption, unpadded, without a batch axis; None when there are none."""

    def __len__(self) -> int: ...

    def read(self, index: int, caption_index: int, view: int = 0) -> dict[str, torch.Tensor]:
        """Features of a row with one of its captions and one view of its medium, by batch key, without a batch axis:
        `latents`, unpadded text features, conditions. They are mapped from the disk: copy before changing them."""


def open_features(folder: Path, adapter: DiffusionAdapter) -> FeatureStore:
    """Open a finished feature set, ours or of the older layout.

    Args:
        folder: `basic_parameters.features_dir`.
        adapter: The configured family and model folder.

    Raises:
        DataError: There are no features, they are not finished, files are missing, or they are for another family, task
            or kind of latents.
        ModelFolderError: The model folder lacks the VAE's configuration, and so do the features.
    """
    files = FeatureFolder(Path(folder))
    if not files.description.is_file() and (files.path / LIST_FILE).is_file():
        adapter.require("vae")
        return LegacyFeatureStore(files.path, adapter)
    description = read_finished(files)
    if not files.null_text.is_file():
        raise DataError("is missing", where=str(files.null_text), key=_KEY, way_out="Run mm extract again.")
    if description.component_configs:
        adapter.note_components(description.component_configs)
    else:
        adapter.require("vae")
    check_fits(description, adapter, files.path)
    return ShardedFeatureStore(files, description)


def read_finished(files: FeatureFolder) -> Description:
    """What made a feature set of ours. Raises `DataError` where there is none, or it is not whole."""
    if not files.description.is_file():
        what = "holds no features" if files.path.is_dir() else "does not exist"
        raise DataError(what, where=str(files.path), key=_KEY, way_out="Run mm extract with this configuration first.")
    description = read_description(files.description)
    _check_complete(files, description)
    return description


class ShardedFeatureStore:
    """A feature set in shards of safetensors. It may be handed to other processes: each opens the shards itself.

    Args:
        files: The folder.
        description: Its `features.json`.
    """

    def __init__(self, files: FeatureFolder, description: Description) -> None:
        self.folder, self.description = files.path, description
        self.records: Sequence[FeatureRecord] = read_index(files.index)
        self._null_text, self._skipped = files.null_text, files.skipped
        self._owner, self._open = os.getpid(), dict[str, _OpenShard]()

    def __len__(self) -> int:
        return len(self.records)

    def __getstate__(self) -> JsonObject:
        return self.__dict__ | {"_open": {}}

    @property
    def model_folder(self) -> str:
        """Folder of the model whose encoders made the features."""
        return self.description.model_folder

    @property
    def components(self) -> Components:
        """The encoders' files as they were."""
        return self.description.components

    @property
    def provenance(self) -> dict[str, dict[str, str]]:
        """Component → file → SHA-256, wherever the folder lies."""
        hashes: dict[str, dict[str, str]] = {}
        for name, files in self.components.items():
            hashes[name] = {file: mark.sha256 for file, mark in files.items()}
        return hashes

    @property
    def skipped(self) -> Sequence[SkippedRow]:
        """Rows that could not be used."""
        return read_skipped(self._skipped)

    @property
    def preprocessing(self) -> JsonMapping:
        """What decided which pixels were made of a medium."""
        return self.description.preprocessing

    @cached_property
    def null_text(self) -> dict[str, torch.Tensor]:
        """Features of the empty caption, without a batch axis."""
        check_file(self._null_text, "hash")
        return read_tensors(self._null_text)

    def read(self, index: int, caption_index: int, view: int = 0) -> dict[str, torch.Tensor]:
        """Features of row `index` with its caption `caption_index`, by batch key.

        Raises:
            DataError: A shard cannot be read, or its bytes have changed.
        """
        record = self.records[index]
        found = {}
        for stored in record.tensors:
            of_view, _, caption = stored.partition("/")
            name, _, number = of_view.partition("@")
            # `prompt_embeds/1` is of the second caption, `latents@2` of the third view, `latents` of the first.
            wanted, told = view, number or "0"
            if caption:
                wanted, told = caption_index, caption
            if int(told) == wanted:
                own = (record.shard, tensor_name(record.own_stem, stored))
                found[name] = self._tensor(*record.places.get(stored, own))
        return found

    def _tensor(self, shard: str, name: str) -> torch.Tensor:
        if self._owner != os.getpid():  # after a fork: a map is cheap, a shared reader is a hazard
            self._owner, self._open = os.getpid(), {}
        path = self.folder / shard
        try:
            if shard not in self._open:
                self._open[shard] = _OpenShard(path)
            return self._open[shard].read(name)
        except DamagedFile as error:
            raise DataError(error.problems[0].what, where=str(path), key=_KEY, way_out=_MAKE_AGAIN) from error
        except (SafetensorError, OSError) as error:
            raise DataError(f"'{name}' cannot be read: {error}", where=str(path), way_out=_MAKE_AGAIN) from error


class _OpenShard:
    """A shard mapped into this process. Each tensor is held against its checksum when it is read for the first time:
    bytes that have changed would be trained on without a sign.

    Raises:
        DamagedFile: The file is missing, cut, or not of this kind.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unread = dict(read_facts(path)[0].checksums)
        self._file: Any = safe_open(path, "pt")  # open until it is forgotten

    def read(self, name: str) -> torch.Tensor:
        """The tensor of this name. Raises `DamagedFile` when its bytes are not what was written."""
        tensor = self._file.get_tensor(name)
        told = self._unread.pop(name, None)
        if told is not None and not has_checksum(tensor, told):
            # Put back, so that a second read of the same bytes fails too.
            self._unread[name] = told
            raise DamagedFile(f"the bytes of '{name}' have changed", where=str(self._path))
        return tensor


def _check_complete(files: FeatureFolder, description: Description) -> None:
    if not files.is_finished or description.contents is None:
        encoded, skipped = count_done(files)
        missing = description.rows - encoded - skipped
        told = ""
        if not description.first_batch:  # later work has encoded only part of the rows: the difference says nothing
            told = f": {missing} of {description.rows} rows are missing"
        raise DataError(
            f"features are not finished{told}",
            where=str(files.path),
            key=_KEY,
            way_out="Run mm extract again: it goes on where it stopped.",
        )
    sizes = {span.path.name: span.path.stat().st_size for span in files.shards()}
    for name, size in description.contents.shards.items():
        if sizes.get(name) != size:
            what = "is missing"
            if name in sizes:
                what = f"has {sizes[name]} bytes, {size} were written"
            raise DataError(
                what,
                where=str(files.path / name),
                key=_KEY,
                way_out="Run mm extract again: it makes what is missing or damaged again.",
            )
