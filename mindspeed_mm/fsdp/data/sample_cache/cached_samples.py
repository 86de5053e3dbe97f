"""A data set whose samples were encoded up front: they are read, not made; everything else about it stays."""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from mindspeed_mm.core.artifacts import process_age_s
from mindspeed_mm.core.errors import ConfigError, DataError, Problem, told_as
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.rows.sources import find_sources
from mindspeed_mm.fsdp.data.data_utils.sample import SampleSize, offer_skipping
from mindspeed_mm.fsdp.data.dataset import DatasetView, MMDataset
from mindspeed_mm.fsdp.data.sample_cache.codec import unpack
from mindspeed_mm.fsdp.data.sample_cache.encoding import encode_rows, find_keys, workers_for
from mindspeed_mm.fsdp.data.sample_cache.folder import CacheFolder, Table
from mindspeed_mm.fsdp.data.sample_cache.identity import SampleKeys, settings_of
from mindspeed_mm.fsdp.data.sample_cache.segment import DamagedSegment, RecordReader
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DatasetParam
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress

_BASIC = "data.dataset_param.basic_parameters"
_FOLDER = ".mm-cache"
_FEW_ROWS = 64
"""So few are encoded in this process: starting others takes longer."""
_PROBLEMS_SHOWN = 5


class CachedSamples(DatasetView):
    """Samples of a cache, equal to the bit to those of the data set it was made of.

    A row without a record (it is bad, or its record was damaged) is encoded when it is asked for, with the same result
    or the same error.

    Args:
        whole: The data set.
        folder: Its cache.
        table: Where the record of each row is.
    """

    def __init__(self, whole: MMDataset, folder: CacheFolder, table: Table) -> None:
        super().__init__(whole)
        self.is_deterministic = True
        self._table = table
        self._is_usable = table.is_usable
        self._reader = RecordReader([folder.path / name for name in table.segments])

    def __len__(self) -> int:
        return len(self._whole)

    def __getitem__(self, index: int) -> Any:
        """Sample `index`, as the data set itself would encode it."""
        if not self._is_usable[index]:
            return self._whole[index]
        _, start, size, crc, _, _ = self._table.entries[index].item()
        try:
            record = self._reader.read(int(self._table.segment[index]), start, size, crc)
        except DamagedSegment as error:
            warnings.warn(f"{error}: {self._whole.place(index)} is encoded again", stacklevel=2)
            return self._whole[index]
        return unpack(record, str(self._whole.place(index)))

    def measure(self, index: int) -> SampleSize | None:
        """Tokens and patches of sample `index`.

        Raises:
            DataError: Encoding it does.
        """
        if not self._is_usable[index]:
            return super().measure(index)
        *_, tokens, patches = self._table.entries[index].item()
        return SampleSize(tokens, patches)

    def known_sizes(self) -> np.ndarray:
        """(rows, 2) int64: tokens and patches of every sample; 0, 0 where a row gives none."""
        sizes = np.stack([self._table.entries["tokens"], self._table.entries["patches"]], axis=1).astype(np.int64)
        return sizes * self._is_usable[:, None]


def encoded_up_front(dataset: MMDataset, dataset_param: DatasetParam) -> CachedSamples:
    """The data set with all its samples encoded, by this process or by one that is at it.

    Args:
        dataset: Of rows.
        dataset_param: Its section.

    Raises:
        ConfigError: The data set is of another kind.
        DataError: A row is bad and the policy is to stop, or too many are.
        MachineError: The cache cannot be written.
    """
    basic = dataset_param.basic_parameters
    if dataset.streams:
        raise ConfigError(
            "streamed rows are not known before they are read",
            key=f"{_BASIC}.preprocess_on_fly",
            way_out="Leave it true, or set streaming: false.",
        )
    if not dataset.has_rows:
        raise ConfigError(
            f"{type(dataset.origin).__name__} cannot be encoded up front: it has no sample(index) and measure(index)",
            key=f"{_BASIC}.preprocess_on_fly",
            way_out="Leave it true.",
        )
    progress = WorkProgress()
    folder = CacheFolder(cache_root(basic), settings_of(dataset_param, dataset.plugin))
    folder.prepare()
    rows = dataset.fingerprint()["hash"]
    mark = folder.table_mark(rows)
    with folder.held(progress.note):
        table = folder.load_table(rows) if folder.table_mark(rows) != mark else None
        if table is None:
            table = _Preparation(dataset, basic, folder, progress).run()
            folder.save_table(rows, table)
    return CachedSamples(dataset, folder, table)


def cache_root(basic: BasicParameters) -> Path:
    """`cache_dir`; where it is not set, a hidden folder beside the first file of rows: a disk that has room for data
    more likely has room for the cache than a home folder, and is shared by hosts that share the data."""
    if basic.cache_dir is not None:
        return Path(basic.cache_dir) / "samples"
    first = find_sources(basic.dataset, basic.dataset_dir, RowFormat())[0].files[0]
    return first.resolve().parent / _FOLDER


class _Preparation:
    """Encodes what a cache lacks.

    Args:
        dataset: The rows.
        basic: Their section.
        folder: The cache, held by this process.
        progress: Where people look.
    """

    def __init__(self, dataset: MMDataset, basic: BasicParameters, folder: CacheFolder, progress: WorkProgress) -> None:
        self._dataset, self._basic, self._folder, self._progress = dataset, basic, folder, progress
        self._keys = SampleKeys(basic)
        self._workers = workers_for(basic.preprocessing_num_workers) if len(dataset) > _FEW_ROWS else 0
        self._bad: dict[int, str] = {}

    def run(self) -> Table:
        """Where the record of each row is."""
        if self._basic.overwrite_cache:
            # The other ranks of this job come later, and find what its first rank has written since it was started.
            is_alone = not dist.is_initialized() or dist.get_world_size() == 1
            self._folder.clear(0.0 if is_alone else process_age_s())
        try:
            keys = self._find_keys()
            table = self._folder.look_up(keys)
            lacking = _lacking(keys, table)
            if not len(lacking):
                return table
            self._encode(lacking)
        finally:
            self._progress.end()
        self._check_bad_fraction()
        return self._folder.look_up(keys)

    def _find_keys(self) -> np.ndarray:
        """Of all rows: each is read, and its media files are asked for their marks."""
        self._progress.begin(len(self._dataset))
        pieces = []
        for piece in find_keys(self._dataset, self._keys, self._workers):
            pieces.append(piece)
            self._progress.advance(len(piece))
        return np.concatenate(pieces)

    def _encode(self, rows: np.ndarray) -> None:
        began = time.monotonic()
        self._progress.begin(len(rows))
        most = self._basic.preprocessing_batch_size
        workers = self._workers if len(rows) > _FEW_ROWS else 0
        for encoded in encode_rows(
            self._dataset, self._keys, rows, self._folder.path, workers=workers, most_at_once=most
        ):
            self._progress.advance(encoded.rows)
            self._bad |= encoded.bad
            if self._basic.on_bad_sample == "error":
                with told_as(offer_skipping):
                    self._stop_at(encoded.bad)
            if self._basic.truncation == "error":
                self._stop_at(encoded.too_long)
        took_s, size_gib = time.monotonic() - began, self._folder.size_bytes() / 2**30
        self._progress.note(
            f"encoded {len(rows)} samples in {took_s:.1f} s; the cache has {size_gib:.2f} GiB: {self._folder.path}"
        )

    def _stop_at(self, reasons: dict[int, str]) -> None:
        """Raise what encoding the first of these rows raises."""
        for row in sorted(reasons)[:1]:
            self._dataset[row]
            raise DataError(reasons[row])  # it could be encoded now: it changes while it is read

    def _check_bad_fraction(self) -> None:
        fraction, total = self._basic.max_bad_fraction, len(self._dataset)
        if len(self._bad) > math.ceil(fraction * total):
            raise DataError(
                f"{len(self._bad)} of {total} samples are bad, more than {fraction:.3%}: repair them, or raise "
                f"{_BASIC}.max_bad_fraction",
                problems=[Problem(self._bad[row]) for row in sorted(self._bad)[:_PROBLEMS_SHOWN]],
            )


def _lacking(keys: np.ndarray, table: Table) -> np.ndarray:
    """Rows to encode, in their order: of several equal ones the first; those without a key, which say why."""
    missing = np.flatnonzero(table.is_missing)
    _, first = np.unique(keys[missing], return_index=True)
    nameless = np.flatnonzero(keys == b"")
    return np.union1d(missing[first], nameless)
