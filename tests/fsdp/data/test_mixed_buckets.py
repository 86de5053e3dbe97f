"""Shares of data sets whose samples have several sizes: kept in every epoch, everything seen, however it is split."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import Part
from mindspeed_mm.fsdp.data.dataloader.buckets import MixedBucketOrder
from mindspeed_mm.fsdp.data.dataloader.order import DataPosition, Deal
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick

GEOMETRY = MediaGeometry(8, 4, (1, 2, 2), 16, is_video=True)
SIZES = [MediaSize(1, 32, 32), MediaSize(5, 32, 64), MediaSize(9, 64, 64)]
ROWS = [SIZES[n] for n in np.random.default_rng(3).choice(3, size=90, p=[0.6, 0.3, 0.1])]
PARTS = (Part("few", 0, 12), Part("many", 12, 90))


def order(deal: Deal | None = None, **changes: Any) -> MixedBucketOrder:
    return MixedBucketOrder(PARTS, (2, 1), ROWS, GEOMETRY, deal or Deal(2, 2, 0, 1), **{"seed": 5, **changes})


def taken(found: MixedBucketOrder, epochs: int) -> list[list[Pick]]:
    """The samples of each epoch of the mixture that count."""
    steps, epoch_steps = found.steps(DataPosition(0, 0)), found.steps_per_epoch
    epochs_of = []
    for _ in range(epochs):
        batches = [batch for _ in range(epoch_steps) for batch in next(steps).step]
        epochs_of.append([pick for b in batches for pick in b.picks[: len(b.picks) - b.blank_rows]])
    return epochs_of


def test_every_epoch_has_the_shares_and_in_time_everything_is_seen_equally_often() -> None:
    epochs = taken(order(), 40)
    for picks in epochs:
        assert sum(pick.row < 12 for pick in picks) == pytest.approx(2 / 3 * len(picks), abs=2)
        assert len(set(picks)) == len(picks)  # a sample that comes twice has another epoch
    seen = Counter(pick.row for picks in epochs for pick in picks)
    assert set(seen) == set(range(90))
    for first, end in ((0, 12), (12, 90)):
        for size in SIZES:
            counts = [seen[row] for row in range(first, end) if ROWS[row] == size]
            assert not counts or max(counts) - min(counts) <= 1
    own = [pick.epoch for picks in epochs for pick in sorted(picks) if pick.row == 0]
    assert sorted(own) == list(range(len(own)))


def test_micro_batches_have_one_size() -> None:
    for planned, _ in zip(order().steps(DataPosition(0, 0)), range(60), strict=False):
        for batch in planned.step:
            assert len({ROWS[pick.row] for pick in batch.picks}) == 1 and batch.cost > 0


def test_ranks_and_accumulation_change_nothing_and_any_step_can_be_resumed() -> None:
    one, other = order(Deal(2, 4, 0, 1)), order(Deal(2, 2, 1, 2))
    assert taken(one, 3) == taken(other, 3)
    position, whole = DataPosition(0, 0), order()
    for _ in range(2 * whole.steps_per_epoch):
        planned = whole.step(position)
        assert order().step(position) == planned
        position = planned.after
    assert position.epoch >= 1


def test_a_pass_over_all_samples_has_no_shares() -> None:
    rows = [p.row for each in order().one_pass() for b in each.step for p in b.picks[: len(b.picks) - b.blank_rows]]
    assert sorted(rows) == list(range(90))


def test_a_part_without_weight_is_left_out_and_rare_sizes_are_not() -> None:
    sizes = [SIZES[0]] * 50 + [SIZES[1]]
    found = MixedBucketOrder((Part("a", 0, 51),), (1,), sizes, GEOMETRY, Deal(1, 1, 0, 1), seed=1)
    assert all(any(pick.row == 50 for pick in picks) for picks in taken(found, 3))
    assert found.batching["mix"] == {"a": 1.0}
