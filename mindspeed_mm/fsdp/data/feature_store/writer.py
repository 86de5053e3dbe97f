"""Writes finished batches while the next one is encoded, so that the disk costs the accelerator nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType

import torch

from mindspeed_mm.core.artifacts import free_bytes, is_disk_full
from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.data.feature_store.feature_file import write_feature_file
from mindspeed_mm.fsdp.data.feature_store.folder import FeatureFolder
from mindspeed_mm.fsdp.data.feature_store.records import FeatureRecord, SkippedRow
from mindspeed_mm.fsdp.data.feature_store.shards import ShardBuilder

_MOST_WAITING = 1
"""Batches that are on their way to the disk while the next one is encoded: a kill loses these two, no more."""


class FeatureWriter:
    """One rank's writer; leaving the `with` waits until everything is on the disk.

    Args:
        folder: The feature set.
        shards: Compacts what is finished, also by other ranks; on one rank only.
    """

    def __init__(self, folder: FeatureFolder, shards: ShardBuilder | None) -> None:
        self._folder, self._shards = folder, shards
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feature-writer")
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._wait(0)
        finally:
            self._thread.shutdown(wait=True)

    def add(
        self,
        number: int,
        tensors: Mapping[str, torch.Tensor],
        records: Sequence[FeatureRecord],
        skipped: Sequence[SkippedRow],
    ) -> None:
        """Hand over a batch.

        Args:
            number: Of the batch in the work.
            tensors: By their full names, on the CPU.
            records: Rows encoded.
            skipped: Rows that could not be used.

        Raises:
            OSError: An earlier batch could not be written.
        """
        self._wait(_MOST_WAITING - 1)
        self._waiting.append(self._thread.submit(self._write, number, tensors, records, skipped))

    def _write(
        self,
        number: int,
        tensors: Mapping[str, torch.Tensor],
        records: Sequence[FeatureRecord],
        skipped: Sequence[SkippedRow],
    ) -> None:
        write_feature_file(self._folder.batch(number), tensors, (number, number), records, skipped)
        if self._shards is not None:
            self._shards.compact()

    def _wait(self, most: int) -> None:
        while len(self._waiting) > most:
            self._waiting.popleft().result()


@contextmanager
def explained(folder: FeatureFolder) -> Iterator[None]:
    """What the operating system says of this folder becomes a `MachineError`, with the numbers that matter."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error) and not str(error.filename).startswith(str(folder.path)):
            raise  # of some other file: nobody foresaw it
        what = "the disk is full" if is_disk_full(error) else f"cannot be written: {error.strerror or error}"
        raise MachineError(
            f"{what} ({free_bytes(folder.path) / 2**30:.2f} GiB free)",
            where=str(error.filename or folder.path),
            key="data.dataset_param.basic_parameters.features_dir",
            way_out="Free some space and run the same command again: finished samples are kept.",
        ) from error
