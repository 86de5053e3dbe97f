"""Samples of a subject paired with samples that preserve the prior (DreamBooth): each micro-batch has as many of both.

`DreamBoothDataset` of diffusers' scripts takes subject i mod n and class picture i mod m
together, for i up to the larger number. Here both sides run through epochs of their own in a shuffled order; an epoch
of pairs is as long as the longer side.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm.core.errors import CheckpointError, ConfigError
from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.dataloader.buckets import TOKENS_KEY, BucketOrder
from mindspeed_mm.fsdp.data.dataloader.order import DataPosition, Deal, MicroBatch, Planned
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick, permutation

_SIZES_KEY = "data.dataset_param.preprocess_parameters.buckets"


class _OneSize(NamedTuple):
    """The samples of one size."""

    size: MediaSize
    subject: list[int]
    prior: list[int]

    @property
    def pairs(self) -> int:
        """Number of pairs in an epoch: that of the longer side's samples."""
        return max(len(self.subject), len(self.prior))


class PairedOrder(BucketOrder):
    """As `BucketOrder` over pairs, with the subject's samples of a micro-batch first. A position counts pairs.

    Args:
        is_prior: Whether each sample preserves the prior.
        sizes: Of each sample.
        geometry: Tells a sample's tokens.
        deal: Sizes of micro-batch and step, in samples.
        seed: Of the order.
        shuffle: Draw at random.
        settings: `drop_last` and `max_tokens` of `BucketOrder`.

    Raises:
        ConfigError: A micro-batch has an odd number of samples or no place for a pair; a size has samples of one kind
            alone.
        DataError: As `BucketOrder`.
    """

    def __init__(
        self,
        is_prior: Sequence[bool],
        sizes: Sequence[MediaSize],
        geometry: MediaGeometry,
        deal: Deal,
        *,
        seed: int,
        shuffle: bool = True,
        max_tokens: int | None = None,
        **settings: Any,
    ) -> None:
        self._sides = _sides_of_one_size(is_prior, sizes)
        if max_tokens is None and deal.micro_batch_size % 2:
            raise ConfigError(
                f"{deal.micro_batch_size} is odd, but a micro-batch has as many samples of the subject as of its prior",
                key="training.micro_batch_size",
                way_out=f"Set {deal.micro_batch_size + 1}.",
            )
        for each in self._sides:
            tokens = 2 * geometry.tokens(geometry.latent_shape(each.size))
            if max_tokens is not None and tokens > max_tokens:
                way_out = f"Raise it to {tokens} or more, or make the samples smaller."
                what = f"a pair of samples of {each.size} has {tokens} tokens, more than {max_tokens}"
                raise ConfigError(what, key=TOKENS_KEY, way_out=way_out)
        self._starts = list(itertools.accumulate((each.pairs for each in self._sides), initial=0))
        of_pairs: list[MediaSize] = []
        for each in self._sides:
            of_pairs += [each.size] * each.pairs
        half = replace(deal, micro_batch_size=max(1, deal.micro_batch_size // 2))
        most_pairs = max_tokens and max_tokens // 2
        super().__init__(of_pairs, geometry, half, seed=seed, shuffle=shuffle, max_tokens=most_pairs, **settings)
        self._all = BucketOrder(sizes, geometry, deal, seed=seed, shuffle=shuffle, max_tokens=max_tokens)
        self.most_tokens = max_tokens
        self.batching |= {"pairs": True}
        self._order_of = lru_cache(maxsize=4 * len(self._sides))(self._order_in_epoch)

    @property
    def most_pixels(self) -> int:
        """Pixels of the largest micro-batch, over all its frames."""
        return 2 * super().most_pixels

    def step(self, position: DataPosition) -> Planned:
        """The step at a position; each sample bears the epoch of its own side and size."""
        planned = super().step(position)
        return planned._replace(step=[self._both(batch) for batch in planned.step])

    def one_pass(self, *, ahead: bool = False) -> Generator[Planned, None, None]:
        """Every sample once, in no pairs."""
        return self._all.one_pass()

    def go_on(
        self, position: DataPosition, before: Mapping[str, object] | None, *, may_skip: bool
    ) -> tuple[DataPosition, str]:
        """As `BucketOrder.go_on`; a run that did not pair its samples goes on at an epoch.

        Raises:
            CheckpointError: Its epoch is not at its end, and `may_skip` is False.
        """
        if before is None or before.get("pairs") or position.index == 0:
            return super().go_on(position, before, may_skip=may_skip)
        if may_skip:
            return DataPosition(position.epoch + 1, 0), f"samples are paired from epoch {position.epoch + 1} on"
        raise CheckpointError(
            "the run began without pairing its samples of subject and prior",
            key="data.dataset_param.basic_parameters.dataset",
            way_out="Add --accept-data-change to leave out the rest of the epoch and to pair them from the next on.",
        )

    def _both(self, batch: MicroBatch) -> MicroBatch:
        pairs = [self._pair(pick) for pick in batch.picks]
        picks = (*(subject for subject, _ in pairs), *(prior for _, prior in pairs))
        return batch._replace(picks=picks, blank_rows=2 * batch.blank_rows, cost=2 * batch.cost)

    def _pair(self, place: Pick) -> tuple[Pick, Pick]:
        """The samples at a place of an epoch of pairs."""
        which = bisect_right(self._starts, place.row) - 1
        sides = self._sides[which]
        number = place.epoch * sides.pairs + place.row - self._starts[which]
        return self._drawn(which, "subject", sides.subject, number), self._drawn(which, "prior", sides.prior, number)

    def _drawn(self, which: int, side: str, rows: list[int], number: int) -> Pick:
        epoch, index = divmod(number, len(rows))
        return Pick(epoch, rows[int(self._order_of(which, side, len(rows), epoch)[index])])

    def _order_in_epoch(self, which: int, side: str, count: int, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(count)
        return permutation(count, derive_seed(self._seed, "pairs", which, side), epoch)


def _sides_of_one_size(is_prior: Sequence[bool], sizes: Sequence[MediaSize]) -> list[_OneSize]:
    found: dict[MediaSize, _OneSize] = {}
    for row, (size, prior) in enumerate(zip(sizes, is_prior, strict=True)):
        sides = found.setdefault(size, _OneSize(size, [], []))
        if prior:
            sides.prior.append(row)
        else:
            sides.subject.append(row)
    for size, sides in found.items():
        if not sides.subject or not sides.prior:
            there, absent = "the prior", "the subject"
            if sides.subject:
                there, absent = absent, there
            raise ConfigError(
                f"{size} has samples of {there} and none of {absent}, and both go through the model together",
                key=_SIZES_KEY,
                way_out="Set height and width, one size for all, or add samples of that size.",
            )
    return list(found.values())
