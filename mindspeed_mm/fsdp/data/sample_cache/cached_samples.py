"""A data set whose samples were encoded up front: they are read, not made; everything else about it stays.

The rows that a cache lacks are encoded by several processes, each of which writes segments of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from mindspeed_mm.core.artifacts import free_bytes, is_disk_full, process_age_s
from mindspeed_mm.core.cores import usable_cores
from mindspeed_mm.core.errors import ConfigError, DataError, MachineError, Problem, told_as
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.rows.sources import find_sources
from mindspeed_mm.fsdp.data.data_utils.sample import SampleSize, TooLongError, offer_skipping
from mindspeed_mm.fsdp.data.dataset import DatasetView, MMDataset
from mindspeed_mm.fsdp.data.open_files import check_keeps_no_file_open
from mindspeed_mm.fsdp.data.sample_cache.codec import pack, unpack
from mindspeed_mm.fsdp.data.sample_cache.folder import (
    CACHE_KEY,
    CacheFolder,
    DamagedSegment,
    RecordReader,
    SegmentWriter,
    Table,
)
from mindspeed_mm.fsdp.data.sample_cache.identity import KEY_BYTES, SampleKeys, settings_of
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DatasetParam
from mindspeed_mm.fsdp.utils.model_parts import attribute_at
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
        # What was drawn while encoding is in the record: reading it needs no seed.
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


def check_can_be_encoded_up_front(dataset: MMDataset) -> None:
    """Raise `ConfigError` for streamed rows, samples that are not made of rows, and code that may draw numbers."""
    key, name = f"{_BASIC}.preprocess_on_fly", type(dataset.origin).__name__
    if dataset.streams:
        what, way_out = "streamed rows are not known before they are read", "Leave it true, or set streaming: false."
        raise ConfigError(what, key=key, way_out=way_out)
    if not dataset.has_rows:
        what = f"{name} cannot be encoded up front: it has no sample(index) and measure(index)"
        raise ConfigError(what, key=key, way_out="Leave it true.")
    if dataset.is_deterministic:
        return
    if dataset.plugin is not None and attribute_at(type(dataset.origin), "is_deterministic", False):
        name = type(dataset.plugin).__name__  # it is for its media plugin that the data set does not say so
    raise ConfigError(
        f"{name} may draw random numbers: its samples would be the same in every epoch",
        key=key,
        way_out=f"Leave it true; or, if {name} draws none, write is_deterministic = True in the class.",
    )


def encoded_up_front(dataset: MMDataset, dataset_param: DatasetParam) -> CachedSamples:
    """The data set with all its samples encoded, by this process or by one that is at it.

    Args:
        dataset: Of rows; see `check_can_be_encoded_up_front`.
        dataset_param: Its section.

    Raises:
        DataError: A row is bad and the policy is to stop, or too many are.
        MachineError: The cache cannot be written.
    """
    basic = dataset_param.basic_parameters
    progress = WorkProgress()
    folder = CacheFolder(cache_root(basic), settings_of(dataset_param, dataset.plugin, dataset.origin))
    folder.prepare()
    rows = dataset.fingerprint()["hash"]
    # Before the lock: a table that is new once it is held was written by the process that was waited for.
    mark = folder.table_mark(rows)
    with folder.held(progress.note):
        table = None
        if folder.table_mark(rows) != mark:
            table = folder.load_table(rows)
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


def can_keep_samples(basic: BasicParameters) -> bool:
    """Whether there is a place for encoded samples: one that is named, or a folder of rows that may be written to."""
    return basic.cache_dir is not None or os.access(cache_root(basic).parent, os.W_OK)


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
        if self._workers:
            check_keeps_no_file_open(dataset)
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
        # The segments are listed again: workers wrote files that this process has not seen.
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
            if self._basic.if_too_long == "error":
                self._stop_at(encoded.too_long)
        took_s, size_gib = time.monotonic() - began, self._folder.size_bytes() / 2**30
        self._progress.note(
            f"encoded {len(rows)} samples in {took_s:.1f} s; the cache has {size_gib:.2f} GiB: {self._folder.path}"
        )

    def _stop_at(self, reasons: dict[int, str]) -> None:
        """Raise what encoding the first of these rows raises."""
        for row in sorted(reasons)[:1]:
            # In this process, so that the error has its own type, place and way out.
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


# --- encoding by several processes ------------------------------------------------------------------------------------


_SEGMENT_BYTES = 64 << 20
_SEGMENT_S = 20.0
"""A worker writes a segment when it has as many bytes, or so long after the last: a kill loses no more."""
_CHUNKS_PER_WORKER = 16
_LEAST_CHUNK = 16
_KEYS_AT_ONCE = 4096
_MEASURED_AT_ONCE = 256
_MOST_WORKERS = 8


@dataclass
class Encoded:
    """What became of some rows."""

    rows: int = 0
    bad: dict[int, str] = field(default_factory=dict)
    """Rows that give no sample → why. They are tried again at every start, for the reason may be gone."""
    too_long: dict[int, str] = field(default_factory=dict)
    error: str | None = None
    """What ended the work."""
    disk_full: bool = False


def find_keys(dataset: MMDataset, keys: SampleKeys, workers: int) -> Iterator[np.ndarray]:
    """The keys of all rows in their order, piece by piece; an empty key where a row cannot even be converted."""
    starts = range(0, len(dataset), _KEYS_AT_ONCE)
    pieces = [range(start, min(start + _KEYS_AT_ONCE, len(dataset))) for start in starts]
    yield from _spread(_KeyFinder(dataset, keys, pieces), workers if len(pieces) > 1 else 0)


def encode_rows(
    dataset: MMDataset, keys: SampleKeys, rows: np.ndarray, folder: Path, *, workers: int, most_at_once: int
) -> Iterator[Encoded]:
    """Encode rows into segments of a folder, chunk by chunk as they are done.

    Args:
        dataset: Of rows.
        keys: Names samples.
        rows: Which.
        folder: Of the cache.
        workers: Processes; 0: in this one.
        most_at_once: Most rows of a chunk.

    Raises:
        MachineError: A process was killed, or the disk is full.
        DataError: Something unforeseen happened to a row.
    """
    # Some chunks for each worker, so that one with long videos does not keep all others waiting at the end.
    size = min(most_at_once, max(_LEAST_CHUNK, -(-len(rows) // (max(1, workers) * _CHUNKS_PER_WORKER))))
    chunks = [rows[start : start + size].tolist() for start in range(0, len(rows), size)]
    for encoded in _spread(_RowEncoder(dataset, keys, chunks, folder), workers):
        if encoded.disk_full:
            raise MachineError(
                f"the disk is full ({free_bytes(folder) / 2**30:.2f} GiB free)",
                where=str(folder),
                key=CACHE_KEY,
                way_out="Free some space or set cache_dir to another disk and start again: finished samples are kept.",
            )
        if encoded.error is not None:
            raise DataError(encoded.error, where=type(dataset.origin).__name__)
        yield encoded


def measured_rows(dataset: MMDataset, rows: np.ndarray) -> np.ndarray:
    """Sizes of rows, found by several processes where they are many.

    Args:
        dataset: Of rows.
        rows: Which.

    Returns:
        (rows, 2) int64 tokens and patches; 0 and 0 where a row cannot be used.

    Raises:
        MachineError: A process was killed.
    """
    chunks = [rows[start : start + _MEASURED_AT_ONCE].tolist() for start in range(0, len(rows), _MEASURED_AT_ONCE)]
    workers = workers_for(dataset.basic_parameters.preprocessing_num_workers) if len(chunks) > 1 else 0
    return np.concatenate([np.zeros((0, 2), np.int64), *_spread(_RowMeasurer(dataset, chunks), workers)])


def workers_for(asked: int | None) -> int:
    """Processes that encode: as asked, else one a core."""
    if asked is not None:
        return asked
    return min(_MOST_WORKERS, usable_cores())


class _KeyFinder(Dataset[np.ndarray]):
    """Ranges of rows → their keys."""

    def __init__(self, dataset: MMDataset, keys: SampleKeys, pieces: Sequence[range]) -> None:
        self._dataset, self._keys, self._pieces = dataset, keys, pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: int) -> np.ndarray:
        return np.array([self._key(row) for row in self._pieces[number]], dtype=f"S{KEY_BYTES}")

    def _key(self, row: int) -> bytes:
        try:
            return self._keys.key(self._dataset.sample(row))
        except DataError:
            return b""


class _RowMeasurer(Dataset[np.ndarray]):
    """Chunks of rows → their sizes."""

    def __init__(self, dataset: MMDataset, chunks: Sequence[list[int]]) -> None:
        self._dataset, self._chunks = dataset, chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, number: int) -> np.ndarray:
        chunk = self._chunks[number]
        sizes = np.zeros((len(chunk), 2), dtype=np.int64)
        for at, row in enumerate(chunk):
            with contextlib.suppress(DataError):
                sizes[at] = self._dataset.measure(row) or (0, 0)
        return sizes


class _RowEncoder(Dataset[Encoded]):
    """Chunks of rows → segments."""

    def __init__(self, dataset: MMDataset, keys: SampleKeys, chunks: Sequence[list[int]], folder: Path) -> None:
        self._dataset, self._keys, self._chunks, self._folder = dataset, keys, chunks, folder

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, number: int) -> Encoded:
        """Encode a chunk. An error comes back as a text: torch would wrap it beyond recognition."""
        encoded, writer, since = Encoded(), SegmentWriter(self._folder), time.monotonic()
        try:
            for row in self._chunks[number]:
                self._add(row, writer, encoded)
                if writer.bytes >= _SEGMENT_BYTES or time.monotonic() - since >= _SEGMENT_S:
                    writer.write()
                    since = time.monotonic()
            writer.write()
        except OSError as error:
            # Only plain values cross the process border; the parent makes the error of them.
            encoded.disk_full = is_disk_full(error)
            encoded.error = f"the samples cannot be written: {error}"
        except Exception as error:  # noqa: BLE001 (a process border, and a plugin's data set is foreign code)
            encoded.error = f"{type(error).__name__}: {error}, while encoding {self._dataset.place(row)}"
        return encoded

    def _add(self, row: int, writer: SegmentWriter, encoded: Encoded) -> None:
        encoded.rows += 1
        try:
            sample = self._dataset.sample(row)
            key = self._keys.key(sample)  # before its media are read: a change in between is found at the next start
            record = pack(self._dataset[row], str(self._dataset.place(row)))
            size = self._dataset.measure(row)
            assert size is not None  # a data set of rows measures them
        # A DataError too, so it comes first. Too long is noted for good; a bad row is tried again.
        except TooLongError as error:
            encoded.too_long[row] = str(error)
            writer.add(key, b"", 0, 0)
        except DataError as error:
            encoded.bad[row] = str(error)
        else:
            writer.add(key, record, size.tokens, size.patches)


def _spread(work: Dataset[object], workers: int) -> Iterator[Any]:
    """What `work` gives for 0, 1, 2 …, in this order, made by processes: torch's, which end when this one is killed."""
    loader = DataLoader(
        work,
        batch_size=None,
        num_workers=workers,
        collate_fn=_pass_sample,
        worker_init_fn=_init_worker,
        # A fork shares the data set's rows; a spawned process would have to pickle them.
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        generator=torch.Generator().manual_seed(0),  # the global one is the model's
    )
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise MachineError(
            f"a process that encodes samples ended: {str(error).splitlines()[0]}",
            way_out="It probably ran out of memory: lower preprocessing_num_workers. Finished samples are kept.",
        ) from error


def _pass_sample(value: object) -> object:
    return value


def _init_worker(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends them
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
