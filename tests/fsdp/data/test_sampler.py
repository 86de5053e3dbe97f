from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.dataloader.order import DataPosition, Deal, GlobalOrder
from mindspeed_mm.fsdp.data.dataloader.sampler import (
    BaseRandomBatchSampler,
    EpochSampler,
    SequentialSampler,
    build_sampler,
    check_sampler_name,
    permutation,
)
from mindspeed_mm.fsdp.params.data_args import DataloaderParam


def global_order(sampler: EpochSampler, global_batch: int, drop_last: bool) -> GlobalOrder:
    return GlobalOrder(sampler, Deal(global_batch, 1, 0, 1), drop_last)


def rows(order: GlobalOrder, steps: int, position: DataPosition | None = None) -> list[Any]:
    start = position or DataPosition(0, 0)
    taken = itertools.islice(order.steps(start), steps)
    return [pick for planned in taken for micro_batch in planned.step for pick in micro_batch.picks]


def test_the_order_is_a_function_of_seed_and_epoch_for_ever() -> None:
    assert permutation(10, seed=42, stream=0).tolist() == [7, 1, 6, 4, 3, 5, 9, 0, 2, 8]
    orders = [permutation(1000, seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert all(np.array_equal(np.sort(order), np.arange(1000)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_without_drop_last_nothing_is_lost_and_nothing_comes_twice() -> None:
    order = global_order(BaseRandomBatchSampler(10, seed=3), global_batch=4, drop_last=False)
    assert order.steps_per_epoch == 3
    picks = rows(order, steps=10)
    for epoch in range(4):
        assert sorted(p.row for p in picks if p.epoch == epoch) == list(range(10))
    assert [p.epoch for p in picks] == sorted(p.epoch for p in picks)


def test_a_batch_may_be_larger_than_the_data_set() -> None:
    picks = rows(global_order(SequentialSampler(3), global_batch=7, drop_last=False), steps=1)
    assert [(p.epoch, p.row) for p in picks] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_drop_last_leaves_out_the_rest_of_an_epoch() -> None:
    order = global_order(SequentialSampler(10), global_batch=4, drop_last=True)
    assert order.steps_per_epoch == 2
    assert [(p.epoch, p.row) for p in rows(order, steps=3)] == [(0, i) for i in range(8)] + [(1, i) for i in range(4)]
    whole = global_order(SequentialSampler(8), global_batch=4, drop_last=True)
    assert [p.row for p in rows(whole, steps=3)] == [*range(8), *range(4)]
    with pytest.raises(DataError, match="has 3 samples, fewer than one global batch of 4"):
        global_order(SequentialSampler(3), global_batch=4, drop_last=True)
    with pytest.raises(DataError, match="has 0 samples"):
        global_order(SequentialSampler(0), global_batch=4, drop_last=False)


@pytest.mark.parametrize("drop_last", [False, True])
def test_every_position_continues_with_the_very_next_sample(drop_last: bool) -> None:
    order = global_order(BaseRandomBatchSampler(11, seed=1), global_batch=3, drop_last=drop_last)
    whole, position = rows(order, steps=12), DataPosition(0, 0)
    for step in range(12):
        restored = DataPosition.from_dict(position.to_dict())
        assert rows(order, 12 - step, restored) == whole[3 * step :]
        position = order.step(position).after


@pytest.mark.parametrize(
    ("dp_size", "accumulation", "micro"),
    [(1, 1, 12), (1, 12, 1), (2, 1, 6), (2, 3, 2), (3, 2, 2), (4, 3, 1), (12, 1, 1)],
)
def test_every_split_of_a_global_batch_deals_the_same_samples(dp_size: int, accumulation: int, micro: int) -> None:
    sampler = SequentialSampler(24)
    for rank in range(dp_size):
        deal = Deal(micro, accumulation, rank, dp_size)
        assert deal.global_batch == 12
        step = GlobalOrder(sampler, deal, drop_last=False).step(DataPosition(0, 12)).step
        for a, micro_batch in enumerate(deal.mine(step)):
            start = 12 + (a * dp_size + rank) * micro
            assert [pick.row for pick in micro_batch.picks] == list(range(start, start + micro))
            assert micro_batch.blank_rows == 0


def test_a_position_beyond_fewer_data_goes_on_with_the_next_epoch() -> None:
    order = GlobalOrder(SequentialSampler(8), Deal(2, 1, 0, 2), drop_last=False)
    (first, *_), position, _ = order.step(DataPosition(3, 100))
    assert [pick.epoch for pick in first.picks] == [4, 4]
    assert position == DataPosition(4, 4)


def test_samplers_by_name() -> None:
    def order(**keys: Any) -> list[int]:
        sampler = build_sampler(DataloaderParam(**keys), size=10, seed=42)
        return [pick.row for pick in sampler.draw(0, 0, 20)]

    in_order = list(range(10))
    assert order() == permutation(10, 42, 0).tolist()
    assert order(sampler_type="SequentialSampler") == in_order
    assert order(shuffle=False) == in_order
    assert order(dataloader_mode="base") == in_order
    assert order(sampler_type="TokenBudgetSampler") == order()
    with pytest.raises(ConfigError, match="Did you mean 'SequentialSampler'"):
        check_sampler_name("SequentalSampler")


@pytest.mark.parametrize("kind", [SequentialSampler, BaseRandomBatchSampler])
def test_a_draw_ends_with_the_epoch(kind: Any) -> None:
    sampler = kind(7, 3)
    assert [pick.row for pick in sampler.draw(2, 5, 10)] == sampler.order(2)[5:].tolist()
    assert sampler.draw(2, 7, 3) == sampler.draw(2, 70, 3) == []
