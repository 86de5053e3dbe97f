"""Samples of different sizes in given shares: steps as those of `buckets`, out of what each epoch takes of each part.

Every epoch takes the same number of samples of each size of each part, so all epochs have equally many steps. Which
ones they are is the next stretch of a sequence that runs through epochs of its own; so only the position is kept.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import Part
from mindspeed_mm.fsdp.data.dataloader.buckets import BucketOrder
from mindspeed_mm.fsdp.data.dataloader.mixing import whole_numbers
from mindspeed_mm.fsdp.data.dataloader.order import DataPosition, Deal, MicroBatch, Planned
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick, permutation


class _Stratum(NamedTuple):
    """The samples of a part that have one size."""

    size: MediaSize
    rows: Sequence[int]
    taken: int
    """How many of them an epoch takes."""


class MixedBucketOrder(BucketOrder):
    """As `BucketOrder`, with epochs of as many samples as all parts together, which are drawn from the parts in given
    shares. Of each size that a part has, an epoch takes one sample at least, so that none is left out for ever.

    Args:
        parts: Samples of each.
        shares: Of the samples, in any unit, one for each part.
        sizes: Of each sample.
        geometry: Tells a sample's tokens.
        deal: Sizes of micro-batch and step.
        seed: Of the order.
        shuffle: Draw the samples of a part at random.
        settings: `drop_last` and `max_tokens` of `BucketOrder`.

    Raises:
        ConfigError, DataError: As `BucketOrder`.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        shares: Sequence[float],
        sizes: Sequence[MediaSize],
        geometry: MediaGeometry,
        deal: Deal,
        *,
        seed: int,
        shuffle: bool = True,
        **settings: Any,
    ) -> None:
        self._strata = list(_strata(parts, shares, sizes))
        self._starts = list(itertools.accumulate((each.taken for each in self._strata), initial=0))
        taken: list[MediaSize] = []
        for stratum in self._strata:
            taken += [stratum.size] * stratum.taken
        super().__init__(taken, geometry, deal, seed=seed, shuffle=shuffle, **settings)
        self._all = BucketOrder(sizes, geometry, deal, seed=seed, shuffle=shuffle, max_tokens=self.most_tokens)
        total = sum(shares)
        self.batching |= {"mix": {part.name: share / total for part, share in zip(parts, shares, strict=True)}}
        self._rows_of = lru_cache(maxsize=2 * len(self._strata))(self._rows)

    def step(self, position: DataPosition) -> Planned:
        """The step at a position; each sample bears the epoch of its own part and size."""
        planned = super().step(position)
        return planned._replace(step=[self._drawn(batch) for batch in planned.step])

    def one_pass(self) -> Iterator[Planned]:
        """Every sample once, whatever the shares are."""
        return self._all.one_pass()

    def _drawn(self, batch: MicroBatch) -> MicroBatch:
        return batch._replace(picks=tuple(self._pick(pick) for pick in batch.picks))

    def _pick(self, place: Pick) -> Pick:
        """The sample at a place of an epoch of the mixture."""
        which = bisect_right(self._starts, place.row) - 1
        stratum = self._strata[which]
        number = place.epoch * stratum.taken + place.row - self._starts[which]
        epoch, index = divmod(number, len(stratum.rows))
        return Pick(epoch, stratum.rows[int(self._rows_of(which, epoch)[index])])

    def _rows(self, which: int, epoch: int) -> np.ndarray:
        rows = len(self._strata[which].rows)
        if not self._shuffle:
            return np.arange(rows)
        return permutation(rows, derive_seed(self._seed, "stratum", which), epoch)


def _strata(parts: Sequence[Part], shares: Sequence[float], sizes: Sequence[MediaSize]) -> Iterator[_Stratum]:
    counts = whole_numbers(shares, sum(part.end - part.first for part in parts))
    for part, of_part in zip(parts, counts, strict=True):
        found: dict[MediaSize, list[int]] = {}
        for row in range(part.first, part.end):
            found.setdefault(sizes[row], []).append(row)
        of_sizes = whole_numbers(list(map(len, found.values())), max(of_part, len(found)))
        for (size, rows), count in zip(found.items(), of_sizes, strict=True):
            yield _Stratum(size, rows, count)
