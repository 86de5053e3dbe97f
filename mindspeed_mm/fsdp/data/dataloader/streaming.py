"""The order of rows that are found while they are read: their number is unknown, so windows of them are shuffled.

Rows are numbered as they stand in the files. Every rank finds them for itself, which reads the files but parses
nothing; a row is parsed only where it is trained on or measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick, permutation


class StreamSampler:
    """Rows in windows of equal size, each shuffled by (seed, epoch, window).

    Args:
        has: Whether a row of this number exists; reads on until it is found or the files end.
        window: Rows of a window; 1 keeps their order.
        seed: Of the order.
    """

    size: int | None = None

    def __init__(self, has: Callable[[int], bool], window: int, seed: int) -> None:
        self._has, self._window, self._seed = has, window, seed

    def draw(self, epoch: int, index: int, count: int) -> list[Pick]:
        """So many rows from the n-th of an epoch on; fewer where the files end."""
        picks: list[Pick] = []
        while len(picks) < count:
            number, place = divmod(index, self._window)
            rows = self._rows_of_window(number)
            if place >= rows:
                break
            order = permutation(rows, derive_seed(self._seed, "window", number), epoch)
            taken = order[place : place + count - len(picks)].tolist()
            picks += [Pick(epoch, number * self._window + row) for row in taken]
            index += len(taken)
        return picks

    def _rows_of_window(self, number: int) -> int:
        first = number * self._window
        if self._has(first + self._window - 1):
            return self._window
        return bisect_left(range(self._window), True, key=lambda place: not self._has(first + place))
