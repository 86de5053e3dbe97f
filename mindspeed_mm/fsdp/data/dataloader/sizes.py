"""How long samples are, found out as they come near: each data rank measures its share of them and tells the others.

Every rank asks for the same rows at the same points of its program, so that no rank waits for an answer that another
never gives. Ranks that share samples (along context, tensor and pipeline axes) each do so in their own data group, and
find the same. What a row will cost is measured before it is encoded, in this process or in one beside the trainer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from typing_extensions import override

from mindspeed_mm.core.errors import DataError, MMError, told_as
from mindspeed_mm.fsdp.data.data_utils.drawn import seeded
from mindspeed_mm.fsdp.data.data_utils.sample import SampleSize
from mindspeed_mm.fsdp.data.data_utils.token_arrays import token_arrays
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick
from mindspeed_mm.fsdp.data.dataloader.side_process import SideJob, SideProcess
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.data.open_files import check_keeps_no_file_open
from mindspeed_mm.fsdp.utils.plugins import place_within

_UNKNOWN, _UNUSABLE = -1, -2
_FEWEST_ROWS = 1024


class SizeBook:
    """Sizes of samples by row, kept for later epochs (8 bytes a row).

    Args:
        measure: Measures some rows.
        rank: This rank among the data ranks.
        ranks: How many there are.
        group: Of the data ranks; None: the others are only imagined, and this one measures everything.
        timeout_s: Longest wait for a share of a window.
    """

    def __init__(
        self,
        measure: Measurer,
        rank: int = 0,
        ranks: int = 1,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._measure, self._group = measure, group
        self.timeout_s: float = timeout_s
        """Longest wait for an answer."""
        self._rank, self._ranks = 0, 1
        if group is not None:
            self._rank, self._ranks = rank, ranks
        self._sizes = np.full((_FEWEST_ROWS, 2), _UNKNOWN, dtype=np.int32)
        self._errors: dict[int, DataError] = {}
        self._learned, self._is_complete = 0, False
        self._expected: deque[np.ndarray] = deque()
        self._process: SideProcess[list[int], Measured] | None = None

    def learn(self, sizes: np.ndarray) -> None:
        """Take over sizes that are known beforehand, on all ranks the same.

        Args:
            sizes: (samples, 2) tokens and patches; 0 tokens: the sample cannot be used, which measuring it tells.
        """
        self._make_room(len(sizes))
        self._learned = len(sizes)
        self._sizes[: len(sizes)] = np.where(sizes[:, :1] > 0, sizes, _UNKNOWN)
        self._is_complete = bool((sizes[:, 0] > 0).all())

    def knows(self, samples: int) -> bool:
        """Whether nothing needs to be measured of the first so many samples but those that cannot be used."""
        return self._learned >= samples

    def table(self, rows: np.ndarray) -> np.ndarray:
        """(rows, 2) int64 tokens and patches of each row, below 0 where it cannot be used, of which `error` tells;
        waits until they are known.

        Raises:
            DataError: The process that measures died or hangs.
        """
        while True:
            # "clip": rows beyond the table read its last line, and count as unknown below.
            sizes = self._sizes.take(rows, axis=0, mode="clip")
            is_unknown = self._are_unknown(rows, sizes)
            if not is_unknown.any():
                return sizes.astype(np.int64)
            if not self._expected:
                self._expect(_each_once(rows[is_unknown]))
            self._take_in(self._expected.popleft())

    def error(self, row: int) -> DataError:
        """Why a row cannot be used."""
        return self._errors[row]

    def of(self, rows: Sequence[int]) -> list[SampleSize | DataError]:
        """Size of each row, or why it cannot be used; waits until it is known.

        Raises:
            DataError: The process that measures died or hangs.
        """
        sizes = self.table(np.array(rows, dtype=np.int64)).tolist()
        return [self._errors.get(row) or SampleSize(*size) for row, size in zip(rows, sizes, strict=True)]

    @property
    def measures_ahead(self) -> bool:
        """Whether `expect` begins with anything."""
        return self._process is not None

    def expect(self, rows: np.ndarray) -> None:
        """Begin to measure rows that will be asked for, where a process of its own does it; does not wait."""
        if self._process is None:
            return
        unknown = _each_once(rows[self._are_unknown(rows, self._sizes.take(rows, axis=0, mode="clip"))])
        if self._expected:
            unknown = unknown[~np.isin(unknown, np.concatenate(list(self._expected)))]
        if len(unknown):
            self._expect(unknown)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """While inside, what is expected is measured by a process beside the trainer, where anything is to measure."""
        if self._is_complete:
            yield
            return
        check_keeps_no_file_open(self._measure.dataset)
        process = self._process = SideProcess(self._measure, self.timeout_s)
        try:
            yield
        finally:
            process.close()
            if self._process is process:
                self._expected.clear()
                self._process = None

    # --- windows -----------------------------------------------------------------------------------------------------

    def _expect(self, rows: np.ndarray) -> None:
        self._expected.append(rows)
        if self._process is not None:
            self._process.begin(self._own(rows))

    def _own(self, rows: np.ndarray) -> list[int]:
        """This rank's share of a window."""
        return list(map(int, rows[self._rank :: self._ranks]))

    def _take_in(self, rows: np.ndarray) -> None:
        """Wait for this rank's share of a window, and for those of the others."""
        if self._process is not None:
            own = self._process.wait()
        else:
            own = self._measure(self._own(rows))
        shares: list[Any] = [own]
        if self._group is not None:
            shares = [None] * self._ranks
            # A collective: all ranks come here for the same window, since `table` is asked for the same rows.
            dist.all_gather_object(shares, own, group=self._group)
        self._make_room(int(rows.max()))
        for rank, share in enumerate(shares):
            mine = rows[rank :: self._ranks]
            self._sizes[mine] = share.sizes
            for number, error in share.errors.items():
                self._sizes[mine[number]] = _UNUSABLE
                self._errors[int(mine[number])] = error

    def _are_unknown(self, rows: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """(rows,) whether each is still to be measured, given what stands for it, or for the last one there is."""
        unknown: np.ndarray = (rows >= len(self._sizes)) | (sizes[:, 0] == _UNKNOWN)
        return unknown

    def _make_room(self, row: int) -> None:
        while row >= len(self._sizes):
            self._sizes = np.concatenate([self._sizes, np.full_like(self._sizes, _UNKNOWN)])


def _each_once(rows: np.ndarray) -> np.ndarray:
    return np.array(list(dict.fromkeys(rows.tolist())), dtype=np.int64)


# --- measuring --------------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """Sizes of some rows, and the errors of those that cannot be used."""

    sizes: np.ndarray
    """(rows, 2) int32 tokens and patches."""
    errors: dict[int, DataError]
    """Number of a row among them → why it cannot be used."""


class Measurer(SideJob[list[int], Measured]):
    """Asks a data set for sizes; one that cannot tell has its samples encoded.

    Args:
        dataset: Samples by index.
        seed: Of the random numbers that encoding may draw.
    """

    def __init__(self, dataset: MMDataset, seed: int) -> None:
        self.dataset, self._seed = dataset, seed

    @override
    def __call__(self, asked: list[int]) -> Measured:
        """Measure rows by index; a row that cannot be used gets size 0 and its error."""
        sizes, errors = np.zeros((len(asked), 2), dtype=np.int32), {}
        for number, row in enumerate(asked):
            try:
                sizes[number] = self.size(row)
            except DataError as error:
                errors[number] = error
        return Measured(sizes, errors)

    def size(self, row: int) -> SampleSize:
        """Size of a row.

        Raises:
            DataError: The sample cannot be used.
        """
        size = self.dataset.measure(row)
        if isinstance(size, SampleSize):
            return size
        if size is not None:
            raise DataError(
                f"measure of {type(self.dataset.origin).__name__} returns {size!r:.60}, not a SampleSize",
                where=str(self.dataset.place(row)),
                way_out=f"Let it return SampleSize(tokens, patches), of {SampleSize.__module__}; or leave it out, and "
                "samples are encoded to learn their lengths.",
            )
        sample = read_sample(self.dataset, Pick(0, row), self._seed)
        with told_as(lambda problem: replace(problem, where=problem.where or str(self.dataset.place(row)))):
            if isinstance(sample, Mapping) and {"chosen", "rejected"} <= sample.keys():
                answers = (sample["chosen"], sample["rejected"])
                return SampleSize(2 * max(len(token_arrays(answer).ids) for answer in answers), 0)
            return SampleSize(len(token_arrays(sample).ids), 0)

    @override
    def doing(self, asked: list[int]) -> str:
        return f"measuring rows {asked[:8]}"

    @override
    def stopped(self, asked: list[int], how: str) -> DataError:
        names = ", ".join(str(self.dataset.place(row)) for row in asked[:8])
        if len(asked) > 8:
            names += " …"
        return DataError(
            f"the process that measures samples {how} at {names}",
            where=type(self.dataset.origin).__name__,
            way_out="Look at these samples and at the storage they are on.",
        )


# --- random numbers that a sample may draw ----------------------------------------------------------------------------


def read_sample(dataset: MMDataset, pick: Pick, seed: int) -> Any:
    """The sample of an epoch as training reads it: the random numbers that it draws depend on nothing else.

    Raises:
        DataError: It cannot be used; whatever a data set from outside raises says so.
    """
    try:
        if dataset.is_deterministic:
            return dataset.item(pick.row, pick.epoch)
        with seeded(seed, pick.epoch, pick.row):
            return dataset.item(pick.row, pick.epoch)
    except Exception as error:
        if dataset.has_rows or isinstance(error, MMError | MemoryError):
            raise
        raise DataError(
            f"the data set failed: {type(error).__name__}: {error}",
            where=str(dataset.place(pick.row)),
            way_out=f"Correct the sample, or the code at {place_within(type(dataset.origin), error)}.",
        ) from error
