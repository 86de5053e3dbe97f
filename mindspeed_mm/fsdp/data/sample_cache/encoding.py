"""Encodes the rows that a cache lacks, by several processes, each of which writes segments of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from mindspeed_mm.core.artifacts import free_bytes, is_disk_full
from mindspeed_mm.core.cores import usable_cores
from mindspeed_mm.core.errors import DataError, MachineError
from mindspeed_mm.fsdp.data.data_utils.sample import TooLongError
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.data.sample_cache.codec import pack
from mindspeed_mm.fsdp.data.sample_cache.folder import CACHE_KEY
from mindspeed_mm.fsdp.data.sample_cache.identity import KEY_BYTES, SampleKeys
from mindspeed_mm.fsdp.data.sample_cache.segment import SegmentWriter

_SEGMENT_BYTES = 64 << 20
_SEGMENT_S = 20.0
"""A worker writes a segment when it has as many bytes, or so long after the last: a kill loses no more."""
_CHUNKS_PER_WORKER = 16
_LEAST_CHUNK = 16
_KEYS_AT_ONCE = 4096
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
        except TooLongError as error:
            encoded.too_long[row] = str(error)
            writer.add(key, b"", 0, 0)
        except DataError as error:
            encoded.bad[row] = str(error)
        else:
            writer.add(key, record, size.tokens, size.patches)


def _spread(work: Dataset[Any], workers: int) -> Iterator[Any]:
    """What `work` gives for 0, 1, 2 …, in this order, made by processes: torch's, which end when this one is killed."""
    loader = DataLoader(
        work,
        batch_size=None,
        num_workers=workers,
        collate_fn=_pass_sample,
        worker_init_fn=_init_worker,
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


def _pass_sample(value: Any) -> Any:
    return value


def _init_worker(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends them
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
