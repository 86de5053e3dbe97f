"""How long samples are, found out as they come near: each data rank measures its share of them and tells the others.

Every rank asks for the same rows at the same points of its program, so that no rank waits for an answer that another
never gives. Ranks that share samples (along context, tensor and pipeline axes) each do so in their own data group, and
find the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch.distributed as dist

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.sample import SampleSize
from mindspeed_mm.fsdp.data.dataloader.measuring import Measurer, MeasuringProcess

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
        self._measure, self._group, self._timeout_s = measure, group, timeout_s
        self._rank, self._ranks = (rank, ranks) if group is not None else (0, 1)
        self._sizes = np.full((_FEWEST_ROWS, 2), _UNKNOWN, dtype=np.int32)
        self._errors: dict[int, DataError] = {}
        self._learned = 0
        self._expected: deque[list[int]] = deque()
        self._process: MeasuringProcess | None = None

    def learn(self, sizes: np.ndarray) -> None:
        """Take over sizes that are known beforehand, on all ranks the same.

        Args:
            sizes: (samples, 2) tokens and patches; 0 tokens: the sample cannot be used, which measuring it tells.
        """
        self._make_room(len(sizes))
        self._learned = len(sizes)
        self._sizes[: len(sizes)] = np.where(sizes[:, :1] > 0, sizes, _UNKNOWN)

    def knows(self, samples: int) -> bool:
        """Whether nothing needs to be measured of the first so many samples but those that cannot be used."""
        return self._learned >= samples

    def of(self, rows: Sequence[int]) -> list[SampleSize | DataError]:
        """Size of each row, or why it cannot be used; waits until it is known.

        Raises:
            DataError: The process that measures died or hangs.
        """
        while unknown := self._unknown(rows):
            if not self._expected:
                self._expect(unknown)
            self._take_in(self._expected.popleft())
        return [self._errors.get(row) or self._known(row) for row in rows]

    def expect(self, rows: Sequence[int]) -> None:
        """Begin to measure rows that will be asked for, where a process of its own does it; does not wait."""
        if self._process is None:
            return
        coming = set(chain.from_iterable(self._expected))
        if unknown := [row for row in self._unknown(rows) if row not in coming]:
            self._expect(unknown)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """While inside, what is expected is measured by a process beside the trainer."""
        self._process = MeasuringProcess(self._measure, self._timeout_s)
        try:
            yield
        finally:
            self._expected.clear()
            process, self._process = self._process, None
            process.close()

    # --- windows -----------------------------------------------------------------------------------------------------

    def _expect(self, rows: list[int]) -> None:
        self._expected.append(rows)
        if self._process is not None:
            self._process.begin(rows[self._rank :: self._ranks])

    def _take_in(self, rows: list[int]) -> None:
        """Wait for this rank's share of a window, and for those of the others."""
        own = self._process.wait() if self._process is not None else self._measure(rows[self._rank :: self._ranks])
        shares: list[Any] = [own]
        if self._group is not None:
            shares = [None] * self._ranks
            dist.all_gather_object(shares, own, group=self._group)
        self._make_room(max(rows))
        for rank, share in enumerate(shares):
            mine = rows[rank :: self._ranks]
            self._sizes[mine] = share.sizes
            for number, error in share.errors.items():
                self._sizes[mine[number]] = _UNUSABLE
                self._errors[mine[number]] = error

    def _unknown(self, rows: Sequence[int]) -> list[int]:
        held = len(self._sizes)
        return [row for row in dict.fromkeys(rows) if row >= held or self._sizes[row, 0] == _UNKNOWN]

    def _known(self, row: int) -> SampleSize:
        return SampleSize(*self._sizes[row].tolist())

    def _make_room(self, row: int) -> None:
        while row >= len(self._sizes):
            self._sizes = np.concatenate([self._sizes, np.full_like(self._sizes, _UNKNOWN)])
