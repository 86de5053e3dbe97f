"""Several data sets in given shares: each runs through its own epochs, and which comes when is a function of the seed.

The shares become whole numbers of a cycle. Every cycle holds each data set exactly as often as its share says, in an
order that is drawn anew; so a position (samples drawn so far) tells how far each data set is, and nothing else is kept.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import Part, find_part
from mindspeed_mm.fsdp.data.dataloader.order import Step
from mindspeed_mm.fsdp.data.dataloader.sampler import Picks, permutation

CYCLE = 10_000
"""Samples of a cycle: shares are kept to a hundredth of a percent."""
_KEY = "data.dataset_param.basic_parameters.mix.weights"


class MixedSampler:
    """Draws from several parts of a data set in given shares. What is called an epoch has as many samples as all parts
    together.

    Args:
        parts: Rows of each.
        shares: Of the samples, in any unit, one for each part.
        seed: Of the orders.
        shuffle: Draw the rows of a part at random, and the parts of a cycle too.
    """

    def __init__(self, parts: Sequence[Part], shares: Sequence[float], seed: int, *, shuffle: bool = True) -> None:
        self.size: int | None = sum(part.end - part.first for part in parts)
        self._parts, self._seed, self._shuffle = parts, seed, shuffle
        self.counts = whole_numbers(shares, CYCLE)
        """Samples of each part in a cycle."""
        self._cycle_of = lru_cache(maxsize=4)(self._cycle)
        self._rows_of = lru_cache(maxsize=2 * len(parts))(self._rows)

    def draw(self, epoch: int, index: int, count: int) -> Picks:
        """So many samples from `index` on, fewer where the epoch ends. Each bears the epoch of its own part."""
        assert self.size is not None
        first = epoch * self.size + index
        end = first + max(0, min(count, self.size - index))
        drawn = [Picks.of(())]
        while first < end:
            cycle, place = divmod(first, CYCLE)
            last = min(end, first - place + CYCLE)
            drawn.append(self._of_cycle(cycle, place, place + last - first))
            first = last
        return Picks(np.concatenate([p.epochs for p in drawn]), np.concatenate([p.rows for p in drawn]))

    def _of_cycle(self, cycle: int, first: int, end: int) -> Picks:
        """The samples at some places of a cycle."""
        parts, before = (each[first:end] for each in self._cycle_of(cycle))
        epochs, rows = np.empty(len(parts), dtype=np.int64), np.empty(len(parts), dtype=np.int64)
        for which, part in enumerate(self._parts):
            own = np.flatnonzero(parts == which)
            # Samples of this part in all cycles before and in this one: so far it is in its own epochs.
            own_epochs, at = np.divmod(cycle * self.counts[which] + before[own], part.end - part.first)
            epochs[own] = own_epochs
            for epoch in np.unique(own_epochs).tolist():  # which ascend
                start, stop = np.searchsorted(own_epochs, [epoch, epoch + 1])
                rows[own[start:stop]] = part.first + self._rows_of(which, epoch)[at[start:stop]]
        return Picks(epochs, rows)

    def _cycle(self, cycle: int) -> tuple[np.ndarray, np.ndarray]:
        """The part of each sample of a cycle, and how many samples of that part the cycle has before it."""
        # evenly spread: the m-th sample of a part with n of them stands at (m + ½) / n
        at = np.concatenate([(np.arange(n) + 0.5) / max(n, 1) for n in self.counts])
        parts = np.repeat(np.arange(len(self.counts)), self.counts)[np.argsort(at, kind="stable")]
        if self._shuffle:
            parts = parts[permutation(CYCLE, derive_seed(self._seed, "mix"), cycle)]
        before = np.zeros(CYCLE, dtype=np.int64)
        for which, n in enumerate(self.counts):
            before[parts == which] = np.arange(n)
        return parts, before

    def _rows(self, which: int, epoch: int) -> np.ndarray:
        rows = self._parts[which].end - self._parts[which].first
        if not self._shuffle:
            return np.arange(rows)
        return permutation(rows, derive_seed(self._seed, "part", which), epoch)


def whole_numbers(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in the proportion of the shares that add up to `total` (largest remainder); a share above zero
    never gets none."""
    scaled = np.asarray(shares, dtype=np.float64) / sum(shares) * total
    counts = np.maximum(np.floor(scaled), scaled > 0).astype(np.int64)
    # Most negative first: those that rounding down took most from.
    by_remainder = np.argsort(counts - scaled, kind="stable")
    while (missing := total - int(counts.sum())) != 0:
        if missing > 0:
            counts[by_remainder[:missing]] += 1
        else:
            # Too many, since shares near zero got one each: the largest gives them back.
            counts[int(np.argmax(counts))] += missing
    return list(map(int, counts))


def weighted_parts(parts: Sequence[Part], weights: Mapping[str, float]) -> tuple[list[Part], list[float]]:
    """The parts that have a weight above zero, and these weights.

    Raises:
        ConfigError: A weight names no entry, an entry has no weight, or all are zero.
    """
    given: dict[int, float] = {}
    names = [part.name for part in parts]
    for name, weight in weights.items():
        try:
            given[find_part(parts, name)] = float(weight)
        except KeyError:
            raise ConfigError(
                f"'{name}' is not an entry of dataset",
                key=f"{_KEY}.{name}",
                way_out=f"{did_you_mean(name, names)}The entries are {', '.join(names)}.",
            ) from None
    without = [name for number, name in enumerate(names) if number not in given]
    if without:
        raise ConfigError(
            f"{', '.join(without)} has no weight", key=_KEY, way_out="Give every entry of dataset one; 0 leaves it out."
        )
    kept, shares = [], []
    for number, part in enumerate(parts):
        if given[number] > 0 and part.end > part.first:
            kept.append(part)
            shares.append(given[number])
    if not kept:
        raise ConfigError("no weight is above 0", key=_KEY, way_out="Give some entry of dataset a weight.")
    return kept, shares


class MixShares:
    """Counts which data set the samples of a run came from.

    Args:
        parts: Rows of each data set that is drawn from.
        tokens: Mean length of the samples of each, where shares are of tokens; None: they are of samples.
    """

    def __init__(self, parts: Sequence[Part], tokens: Sequence[float] | None = None) -> None:
        self._parts, self._worth = parts, tokens or [1.0] * len(parts)
        self._ends = [part.end for part in parts]
        self._counts = np.zeros(len(parts), dtype=np.int64)

    def count(self, step: Step) -> None:
        """Count the samples of a step, over all ranks."""
        rows = [Picks.of(batch.picks).rows[: len(batch.picks) - batch.blank_rows] for batch in step]
        parts = np.searchsorted(self._ends, np.concatenate(rows), side="right")
        self._counts += np.bincount(parts, minlength=len(self._parts))

    def achieved(self) -> dict[str, float]:
        """Share of each data set so far, by samples or by tokens as the weights are."""
        weighed = list(map(operator.mul, self._counts.tolist(), self._worth))
        total = sum(weighed) or 1.0
        return {part.name: share / total for part, share in zip(self._parts, weighed, strict=True)}
