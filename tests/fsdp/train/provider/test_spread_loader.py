"""A loader of torch that knows nothing of ranks is given the distributed sampler; its other settings stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset

from mindspeed_mm.fsdp.data.dataloader.order import Deal
from mindspeed_mm.fsdp.train.provider.loader import check_sharded, set_epoch, spread_over_ranks

DATA = TensorDataset(torch.arange(10))


def rows(loader: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


def spread(loader: Any, rank: int, ranks: int = 2) -> Any:
    made = spread_over_ranks(loader, Deal(2, 1, rank, ranks))
    check_sharded(made, ranks)
    return made


@pytest.mark.parametrize("drop_last", [False, True])
def test_rows_in_order_take_turns_over_ranks(drop_last: bool) -> None:
    found = [rows(spread(DataLoader(DATA, batch_size=2, drop_last=drop_last), rank)) for rank in (0, 1)]
    assert found[0][:2] == [[0, 2], [4, 6]] and found[1][:2] == [[1, 3], [5, 7]]
    assert [each[2:] for each in found] == ([[], []] if drop_last else [[[8]], [[9]]])


def test_rows_at_random_are_drawn_once_in_each_epoch() -> None:
    loaders = [spread(DataLoader(DATA, batch_size=2, shuffle=True), rank) for rank in (0, 1)]
    epochs = []
    for epoch in (0, 1):
        for loader in loaders:
            set_epoch(loader, epoch)
        drawn = [row for loader in loaders for batch in rows(loader) for row in batch]
        assert sorted(drawn) == list(range(10))
        epochs.append(drawn)
    assert epochs[0] != epochs[1]


def test_settings_of_the_loader_stay() -> None:
    def collate(samples: list[Any]) -> Any:
        return [torch.stack([sample[0] for sample in samples])]

    given = DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 3, False), collate_fn=collate, num_workers=1, timeout=9
    )
    made = spread(given, 1)
    assert (made.collate_fn, made.num_workers, made.timeout, made.batch_size) == (collate, 1, 9, 3)
    assert isinstance(made.sampler, DistributedSampler) and made.sampler.rank == 1


def test_what_knows_of_ranks_or_stands_alone_is_left_as_it_is() -> None:
    own = DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0))
    assert spread(own, 0) is own
    alone = DataLoader(DATA)
    assert spread(alone, 0, ranks=1) is alone
    with_replacement = DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True))
    assert spread_over_ranks(with_replacement, Deal(2, 1, 0, 2)) is with_replacement
