"""The order for samples of different sizes: every micro-batch has one size, every step is balanced over ranks.

An epoch is shuffled and grouped by size. As many steps as possible take all their micro-batches from one size; what is
left over of each size is put together with leftovers of nearly equal cost. Nothing is lost and nothing comes twice. The
whole is a function of (seed, epoch, micro-batches of a step): two ranks that accumulate once and one rank that
accumulates twice have the same steps.

Of data sets in given shares, every epoch takes the same number of samples of each size of each part, so all epochs have
equally many steps. Which ones they are is the next stretch of a sequence that runs through epochs of its own; so only
the position is kept.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm.core.errors import CheckpointError, ConfigError
from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import Part
from mindspeed_mm.fsdp.data.dataloader.mixing import whole_numbers
from mindspeed_mm.fsdp.data.dataloader.order import DataPosition, Deal, MicroBatch, Order, Planned, Step, too_few
from mindspeed_mm.fsdp.data.dataloader.planning import ATTENTION_TOKENS, divided
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick, permutation

TOKENS_KEY = "data.dataloader_param.max_tokens_per_batch"


@dataclass(frozen=True)
class Bucket:
    """The samples of one size, which may share a micro-batch."""

    size: MediaSize
    tokens: int
    """Tokens of one sample of this size."""
    rows: int
    """Samples of a micro-batch."""

    def cost(self, rows: int) -> float:
        """What a micro-batch takes, relative to others: linear layers, and attention among a sample's tokens."""
        return rows * self.tokens * (1 + self.tokens / ATTENTION_TOKENS)


class BucketOrder(Order):
    """Steps over samples of different sizes.

    Args:
        sizes: Of each sample.
        geometry: Tells a sample's tokens.
        deal: Sizes of micro-batch and step.
        seed: Of the shuffle.
        shuffle: A new order every epoch; otherwise samples of a size keep their order.
        drop_last: Leave out the micro-batches that do not make up a step at the end of an epoch (others each time).
            Otherwise they are divided until every rank has some, at worst blank ones.
        max_tokens: Most latent tokens of a micro-batch, in place of a fixed number of samples.

    Raises:
        ConfigError: One sample alone has more tokens.
        DataError: No step fits into an epoch.
    """

    def __init__(
        self,
        sizes: Sequence[MediaSize],
        geometry: MediaGeometry,
        deal: Deal,
        *,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
        max_tokens: int | None = None,
    ) -> None:
        self._deal, self._seed, self._shuffle, self._drop_last = deal, seed, shuffle, drop_last
        self.most_tokens, self._geometry = max_tokens, geometry
        self.batching = {
            "micro_batches_per_step": deal.micro_batches,
            "micro_batch_size": deal.micro_batch_size,
            "max_tokens_per_batch": max_tokens,
            "shuffle": shuffle,
        }
        numbers: dict[MediaSize, int] = {}
        """Size → number of its bucket, in the order of first appearance."""
        self._bucket_of = np.array([numbers.setdefault(size, len(numbers)) for size in sizes], dtype=np.int64)
        self.buckets = [_bucket(size, geometry, deal.micro_batch_size, max_tokens) for size in numbers]
        self._layout = lru_cache(maxsize=2)(self._lay_out)
        full = 0
        for bucket, samples in zip(self.buckets, np.bincount(self._bucket_of).tolist(), strict=True):
            full += math.ceil(samples / bucket.rows)
        if full == 0 or (drop_last and full < deal.micro_batches):
            raise too_few(len(sizes), f"too few for {deal.micro_batches} micro-batches of one size each")
        whole, rest = divmod(full, deal.micro_batches)
        self._steps_per_epoch = whole + (rest > 0 and not drop_last)
        self._dropped = rest if drop_last else 0

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch, the same for all epochs."""
        return self._steps_per_epoch

    @property
    def dropped(self) -> str:
        """Micro-batches that an epoch leaves out at its end (`drop_last`), others in each epoch; empty for none."""
        rest = self._dropped
        if rest:
            return f"{rest:,} {'micro-batch' if rest == 1 else 'micro-batches'}"
        return ""

    @property
    def most_pixels(self) -> int:
        """Pixels of the largest micro-batch, over all its frames."""
        return max(b.rows * b.size.frames * b.size.height * b.size.width for b in self.buckets)

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps until so many epochs are done."""
        return math.ceil(epochs * self.steps_per_epoch)

    def step(self, position: DataPosition) -> Planned:
        """The step at a position.

        Raises:
            CheckpointError: No step begins there: batches were cut otherwise, or were of other data, when the position
                was saved.
        """
        epoch, index = position.epoch, position.index
        if index >= self._layout(epoch).samples:  # beyond it when a run goes on with fewer data than before
            epoch, index = epoch + 1, 0
        layout = self._layout(epoch)
        number = int(np.searchsorted(layout.step_starts, index))
        if layout.step_starts[number] != index:
            raise CheckpointError(
                f"sample {index} of epoch {epoch} begins no step",
                key="training.micro_batch_size",
                way_out="Resume with the data, micro_batch_size, max_tokens_per_batch and number of micro-batches as "
                "saved; or start a new run from its weights: --weights-only.",
            )
        step = [batch._replace(cost=self._cost(batch)) for batch in layout.step(epoch, number)]
        return Planned(step, DataPosition(epoch, int(layout.step_starts[number + 1])))

    def go_on(
        self, position: DataPosition, before: Mapping[str, object] | None, *, may_skip: bool
    ) -> tuple[DataPosition, str]:
        """As `Order.go_on`. Steps of other micro-batches are other steps: the place in the epoch is kept when one of
        today's begins there and those before it take the same samples as the ones that were done.

        Raises:
            CheckpointError: None of today's steps begins there, and `may_skip` is False.
        """
        done = self._before(before)._layout(position.epoch)
        next_epoch = DataPosition(position.epoch + 1, 0)
        if position.index == 0:
            return position, ""
        if position.index >= done.samples:
            return next_epoch, ""
        if self._layout(position.epoch).begins_alike(done, position.index):
            return position, ""
        left = done.samples - position.index
        if may_skip:
            note = (
                f"the run goes on with epoch {position.epoch + 1}: {left} samples of epoch {position.epoch} are left "
                "out, since the steps of today would not take just them"
            )
            return next_epoch, note
        raise CheckpointError(
            f"{left} samples of epoch {position.epoch} are left, and the steps of other micro-batches would not take "
            "just them",
            key="training.micro_batch_size",
            way_out="Give micro_batch_size and ranks × accumulation as they were; or add --accept-data-change to leave "
            "these samples out and go on with the next epoch.",
        )

    def _before(self, batching: Mapping[str, Any] | None) -> BucketOrder:
        """The order of the same samples with the micro-batches of then."""
        if batching is None or batching == self.batching or self.most_tokens is not None:
            return self
        deal = Deal(batching["micro_batch_size"], batching["micro_batches_per_step"], dp_rank=0, dp_size=1)
        sizes = [self.buckets[bucket].size for bucket in self._bucket_of.tolist()]
        return BucketOrder(
            sizes, self._geometry, deal, seed=self._seed, shuffle=self._shuffle, drop_last=self._drop_last
        )

    def one_pass(self, *, ahead: bool = False) -> Generator[Planned, None, None]:
        """Every sample once, size by size in the order of the rows; steps are filled up with blank rows."""
        layout = self._arrange(np.arange(len(self._bucket_of)), None, drop_last=False)
        for number, end in enumerate(layout.step_starts[1:].tolist()):
            yield Planned(layout.step(0, number), DataPosition(0, end))

    def _cost(self, batch: MicroBatch) -> float:
        bucket = self.buckets[self._bucket_of[batch.picks[0].row]]
        return bucket.cost(len(batch.picks) - batch.blank_rows)

    # --- one epoch ---------------------------------------------------------------------------------------------------

    def _lay_out(self, epoch: int) -> Layout:
        samples = len(self._bucket_of)
        if self._shuffle:
            return self._arrange(permutation(samples, self._seed, epoch), epoch, self._drop_last)
        return self._arrange(np.arange(samples), None, self._drop_last)

    def _arrange(self, order: np.ndarray, epoch: int | None, drop_last: bool) -> Layout:
        """The steps of an epoch; `epoch` also shuffles the steps, None sorts them by their first row."""
        whole, leftovers = self._group(order)
        if drop_last:
            leftovers = self._without_rest(leftovers, epoch)
        parts = [each.rows for each in whole]
        # Sizes of the micro-batches, a line per step; the empty one gives the shape of an epoch without steps.
        lines = [np.empty((0, self._deal.micro_batches), dtype=np.int64)]
        for each in whole:
            lines.append(np.full((each.steps, self._deal.micro_batches), each.bucket.rows))
        for step in self._mix(leftovers):
            parts += step
            lines.append(np.array([[len(part) for part in step]]))
        rows, cuts = np.concatenate(parts), np.concatenate(lines)
        return _permuted(rows, cuts, self._order_of_steps(rows, cuts.sum(axis=1), epoch))

    def _group(self, order: np.ndarray) -> tuple[list[_FullSteps], list[_Leftover]]:
        """Steps of one size, and the micro-batches that remain of each size."""
        whole, leftovers = [], []
        grouped = order[np.argsort(self._bucket_of[order], kind="stable")]
        ends = np.cumsum(np.bincount(self._bucket_of, minlength=len(self.buckets)))
        for bucket, rows in zip(self.buckets, np.split(grouped, ends[:-1]), strict=True):
            steps = len(rows) // bucket.rows // self._deal.micro_batches
            taken = steps * bucket.rows * self._deal.micro_batches
            whole.append(_FullSteps(bucket, steps, rows[:taken]))
            for start in range(taken, len(rows), bucket.rows):
                part = rows[start : start + bucket.rows]
                leftovers.append(_Leftover(bucket.cost(len(part)), part))
        return whole, leftovers

    def _without_rest(self, leftovers: list[_Leftover], epoch: int | None) -> list[_Leftover]:
        """As many as make up whole steps; which are left out changes with the epoch."""
        kept = len(leftovers) // self._deal.micro_batches * self._deal.micro_batches
        chosen = np.arange(len(leftovers))
        if epoch is not None:
            chosen = permutation(len(leftovers), derive_seed(self._seed, "leftovers"), epoch)
        return [leftovers[i] for i in sorted(chosen[:kept].tolist())]

    def _mix(self, leftovers: list[_Leftover]) -> list[list[np.ndarray]]:
        """Steps of leftovers, the costliest together; the last is divided until it has its number of micro-batches."""
        count = self._deal.micro_batches
        leftovers = sorted(leftovers, key=lambda left: -left.cost)
        steps = []
        for start in range(0, len(leftovers), count):
            steps.append([left.rows for left in leftovers[start : start + count]])
        if steps:
            steps[-1] = divided(steps[-1], count)
        return steps

    def _order_of_steps(self, rows: np.ndarray, lengths: np.ndarray, epoch: int | None) -> np.ndarray:
        if epoch is not None:
            return permutation(len(lengths), derive_seed(self._seed, "steps"), epoch)
        starts = np.cumsum(lengths) - lengths
        return np.argsort(rows[starts], kind="stable")


class _FullSteps(NamedTuple):
    """Whole steps whose micro-batches all have one size; `rows` holds their samples, one step after the other."""

    bucket: Bucket
    steps: int
    rows: np.ndarray


class _Leftover(NamedTuple):
    """A micro-batch of a size that did not fill a step."""

    cost: float
    rows: np.ndarray


@dataclass(frozen=True)
class Layout:
    """An epoch: its samples in order, and where micro-batches and steps begin (with the end of the last)."""

    rows: np.ndarray
    starts: np.ndarray
    step_starts: np.ndarray

    @property
    def samples(self) -> int:
        """Samples that the epoch uses."""
        return len(self.rows)

    def begins_alike(self, other: Layout, index: int) -> bool:
        """Whether a step begins at a sample, and those before it take what the other's first so many samples are."""
        return index in self.step_starts and set(self.rows[:index].tolist()) == set(other.rows[:index].tolist())

    def step(self, epoch: int, number: int) -> Step:
        """Micro-batches of a step; an empty one repeats the sample before it as a blank row."""
        count = (len(self.starts) - 1) // (len(self.step_starts) - 1)
        borders = self.starts[number * count : (number + 1) * count + 1].tolist()
        step = []
        for start, end in itertools.pairwise(borders):
            is_blank = end == start
            taken = self.rows[start - 1 : start] if is_blank else self.rows[start:end]
            picks = tuple(Pick(epoch, row) for row in taken.tolist())
            step.append(MicroBatch(picks, int(is_blank)))
        return step


def _permuted(rows: np.ndarray, cuts: np.ndarray, order: np.ndarray) -> Layout:
    """The layout whose steps come in another order; `cuts` has the sizes of the micro-batches, a line per step."""
    lengths = cuts.sum(axis=1)
    new_lengths = lengths[order]
    old_starts = (np.cumsum(lengths) - lengths)[order]
    new_starts = np.cumsum(new_lengths) - new_lengths
    # All rows of a step move by the same distance, so place p of the new order is at p + distance in the old one.
    distance = np.repeat(old_starts - new_starts, new_lengths)
    moved = rows[np.arange(len(rows)) + distance]
    starts = np.concatenate([[0], np.cumsum(cuts[order])])
    return Layout(moved, starts, starts[:: cuts.shape[1]])


def _bucket(size: MediaSize, geometry: MediaGeometry, micro_batch_size: int, max_tokens: int | None) -> Bucket:
    tokens = geometry.tokens(geometry.latent_shape(size))
    if max_tokens is None:
        return Bucket(size, tokens, micro_batch_size)
    if tokens > max_tokens:
        raise ConfigError(
            f"a sample of {size} has {tokens} tokens, more than {max_tokens}",
            key=TOKENS_KEY,
            way_out=f"Raise it to {tokens} or more, or make the samples smaller.",
        )
    return Bucket(size, tokens, max_tokens // tokens)


# --- several data sets in given shares --------------------------------------------------------------------------------


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

    def one_pass(self, *, ahead: bool = False) -> Generator[Planned, None, None]:
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
