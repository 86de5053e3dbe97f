"""Writes finished batches while the next one is encoded, so that the disk costs the accelerator nothing, and puts them
together into shards, in the order of the work.

Which batches share a shard follows from their sizes alone, and a sample that is there twice is kept where it comes
first: so the shards are the same to the bit however often the work was killed and by how many ranks it was done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch

from mindspeed_mm.core.artifacts import free_bytes, is_disk_full
from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.data.feature_store.feature_file import (
    FeatureRecord,
    SkippedRow,
    read_facts,
    read_tensors,
    write_feature_file,
)
from mindspeed_mm.fsdp.data.feature_store.folder import FeatureFolder

SHARD_BYTES = 512 << 20
"""A shard is closed when it has as many."""
HEADER_BYTES = 16 << 20
"""Or when its header has as many: it is parsed as a whole, and the format refuses more than 100 MB."""


@dataclass
class _Group:
    """Batches of the shard that comes next."""

    numbers: list[int] = field(default_factory=list)
    total_bytes: int = 0
    header_bytes: int = 0

    def add(self, number: int, path: Path) -> None:
        self.numbers.append(number)
        self.total_bytes += path.stat().st_size
        with path.open("rb") as file:
            self.header_bytes += int.from_bytes(file.read(8), "little")


class ShardBuilder:
    """Compacts a feature set's batches; one process at a time.

    Args:
        folder: The feature set.
        batches: How many batches the work has.
        shard_bytes: Size of a shard.
        first: Number of the first of them; those before it are of earlier work, and are taken as far as they are there.
    """

    def __init__(self, folder: FeatureFolder, batches: int, shard_bytes: int = SHARD_BYTES, *, first: int = 0) -> None:
        self._folder, self._shard_bytes, self._first, self._end = folder, shard_bytes, first, first + batches
        self._first_batch: dict[str, int] = {}
        """Stem → the first batch that has it: there its tensors are kept."""
        for span in folder.shards():
            self._remember(folder.facts(span.path)[0].records, span.first)
        self._gaps = self._find_gaps()
        self._group = _Group()

    def compact(self) -> None:
        """Make every shard whose batches are all there; their files go away once the shard has its name."""
        while self._gaps and self._is_group_complete():
            start, end = self._gaps.pop(0)
            self._write(self._group.numbers)
            start, self._group = self._group.numbers[-1] + 1, _Group()
            if start <= end:
                self._gaps.insert(0, (start, end))

    def _find_gaps(self) -> list[tuple[int, int]]:
        """First and last batch of each stretch that is in no shard, and is there or will be."""
        numbers = {number for number in self._folder.pending() if number < self._first}
        numbers |= set(range(self._first, self._end))
        for span in self._folder.shards():
            numbers -= set(range(span.first, span.last + 1))
        gaps: list[tuple[int, int]] = []
        for number in sorted(numbers):
            # No stretch goes from earlier work into the latest.
            if gaps and gaps[-1][1] == number - 1 and number != self._first:
                gaps[-1] = (gaps[-1][0], number)
            else:
                gaps.append((number, number))
        return gaps

    def _is_group_complete(self) -> bool:
        """Take batches into the next shard until it is full; False when one of them is missing."""
        start, end = self._gaps[0]
        group = self._group
        while not self._is_full(group):
            number = start + len(group.numbers)
            if number > end:
                return True
            path = self._folder.batch(number)
            if not path.exists():
                return False
            group.add(number, path)
        return True

    def _is_full(self, group: _Group) -> bool:
        return group.total_bytes >= self._shard_bytes or group.header_bytes >= HEADER_BYTES

    def _write(self, numbers: list[int]) -> None:
        tensors: dict[str, torch.Tensor] = {}
        records: list[FeatureRecord] = []
        skipped: list[SkippedRow] = []
        for number in numbers:
            path = self._folder.batch(number)
            facts, _ = read_facts(path)
            self._remember(facts.records, number)
            own = {record.own_stem for record in facts.records if self._first_batch[record.own_stem] == number}
            # A sample that came twice keeps its tensors where it came first.
            tensors |= {name: value for name, value in read_tensors(path).items() if name.partition("/")[0] in own}
            records += facts.records
            skipped += facts.skipped
        first, last = numbers[0], numbers[-1]
        write_feature_file(self._folder.shard(first, last), tensors, (first, last), records, skipped)
        for number in numbers:
            # Not before the shard has its name: after a kill the batches are still there to be compacted again.
            self._folder.batch(number).unlink()

    def _remember(self, records: Iterable[FeatureRecord], batch: int) -> None:
        for record in records:
            stem = record.own_stem
            self._first_batch[stem] = min(batch, self._first_batch.get(stem, batch))


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
