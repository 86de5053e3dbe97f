"""Rows that are streamed: shuffled in windows, the same on every split, parsed where they are used, resumed exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data import DataPosition, build_mm_dataset
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick, StreamSampler
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from tests.fsdp.data.buffered_data import Texts, loader, mixed_lengths, names_in, steps_of_all
from tests.fsdp.data.conftest import conversation, write_jsonl


class Stream(Texts):
    """Texts whose number nobody tells."""

    streams = True
    measure = Texts.measure

    def __init__(self, *args: Any, **basic: Any) -> None:
        super().__init__(*args, **basic)
        self.furthest = 0
        self.parsed: set[int] = set()

    def __len__(self) -> int:
        raise TypeError("nobody knows")

    def has(self, index: int) -> bool:
        self.furthest = max(self.furthest, index)
        return index < len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.parsed.add(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("rows", [1, 9, 10, 11, 37, 40])
def test_every_window_is_shuffled_and_every_row_comes_once(rows: int) -> None:
    sampler = StreamSampler(lambda index: index < rows, 10, seed=3)
    for epoch in range(2):
        picks = sampler.draw(epoch, 0, 1000)
        assert sorted(pick.row for pick in picks) == list(range(rows))
        for start in range(0, rows, 10):
            window = [pick.row for pick in picks[start : start + 10]]
            assert sorted(window) == list(range(start, min(start + 10, rows)))
        for start in range(rows + 2):
            assert sampler.draw(epoch, start, 4) == picks[start : start + 4]
    if rows > 9:
        assert [p.row for p in sampler.draw(0, 0, 40)] != [p.row for p in sampler.draw(1, 0, 40)] != list(range(rows))
    in_order = StreamSampler(lambda index: index < rows, 1, seed=3)
    assert in_order.draw(0, 0, 50) == [Pick(0, row) for row in range(rows)]


@pytest.mark.parametrize(
    ("basic", "keys"),
    [({}, {"micro": 3}), ({}, {"micro": 3, "drop_last": True}), ({"packing": True, "cutoff_len": 64}, {})],
)
def test_one_sequence_over_stops_ranks_and_workers(basic: dict[str, Any], keys: dict[str, Any]) -> None:
    def stream() -> Stream:
        return Stream(mixed_lengths(150), **basic)

    keys = {"shuffle_window": 40, **keys}
    whole = steps_of_all(stream(), 30, 1, accumulation=2, **keys)
    position, found = DataPosition(0, 0), []
    for ranks, steps, workers in ((1, 5, 0), (2, 9, 0), (1, 2, 1), (2, 14, 0)):
        split = {"accumulation": 2 // ranks, "num_workers": workers, "position": position, **keys}
        found += steps_of_all(stream(), steps, ranks, **split)
        first = loader(stream(), ranks=ranks, **split)
        list(islice(first, steps))
        position = DataPosition.from_dict(json.loads(json.dumps(first.position.to_dict())))
    assert found == whole


def test_nothing_beyond_the_window_is_looked_for_and_only_ones_own_is_parsed() -> None:
    streams = [Stream([8] * 10_000) for _ in range(2)]
    taken = []
    for rank, stream in enumerate(streams):
        data = loader(stream, rank=rank, ranks=2, micro=4, shuffle_window=100)
        taken.append({int(n) for step in islice(data, 5) for batch in step for n in batch["sample_ids"]})
        assert stream.furthest < 200
        assert stream.parsed == taken[rank]
    assert not taken[0] & taken[1]


def test_epochs_cannot_be_counted() -> None:
    data = loader(Stream([8] * 100))
    assert data.steps_per_epoch is None
    assert data.describe() == "rows as they are found"
    with pytest.raises(
        ConfigError, match=r"training.train_iters  the number of streamed rows .* Set it to a number of steps"
    ):
        data.steps_for(2)
    packed = loader(Stream([8] * 100, packing=True, cutoff_len=64))
    with pytest.raises(ConfigError, match=r"training.train_iters"):
        packed.steps_for(2)


def test_bad_rows_are_replaced_by_rows_near_by() -> None:
    def stream() -> Stream:
        return Stream([8] * 400, bad=[5, 200], on_bad_sample="skip", max_bad_fraction=0.01)

    whole = names_in(steps_of_all(stream(), 80, 1, micro=4, shuffle_window=50))
    assert not {5, 200} & set(whole)
    assert names_in(steps_of_all(stream(), 80, 2, micro=2, shuffle_window=50)) == whole
    data = loader(stream(), micro=4)
    list(islice(data, 100))
    assert sorted(data.counts.bad) == ["200", "5"]
    broken = Stream([8] * 400, bad=range(0, 400, 3), on_bad_sample="skip", max_bad_fraction=0.01)
    with pytest.raises(DataError, match=r"11 of 1000 samples are bad, more than 1.000%"):
        list(islice(loader(broken, micro=4), 100))


def test_what_does_not_go_together() -> None:
    with pytest.raises(ConfigError, match="mix  shares of data sets that are streamed are not kept"):
        loader(Stream([8] * 10, mix={"weights": {"a": 1}}))


def test_real_files(tmp_path: Path, param: Callable[..., DatasetParam]) -> None:
    write_jsonl(tmp_path / "a.jsonl", [conversation(f"one {i}?", "two") for i in range(7)])
    write_jsonl(tmp_path / "b.jsonl", [conversation(f"three {i}?", "four") for i in range(6)])
    dataset, _ = build_mm_dataset(param("a.jsonl,b.jsonl", streaming=True))
    whole, _ = build_mm_dataset(param("a.jsonl,b.jsonl"))
    for workers in (0, 2):
        data = loader(dataset, micro=1, shuffle_window=5, num_workers=workers)
        names = [name for step in islice(data, 26) for batch in step for name in batch["sample_ids"]]
        assert sorted(names[:13]) == sorted(names[13:]) == sorted(whole[i]["sample_id"] for i in range(13))
        assert set(names[:5]) == {f"a.jsonl:{n}" for n in range(1, 6)}
        assert data.position == DataPosition(1, 13)
    with pytest.raises(ConfigError, match="val_rate  streamed rows cannot be held out"):
        build_mm_dataset(param("a.jsonl", streaming=True, val_rate=0.5))
