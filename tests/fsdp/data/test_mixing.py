"""Several data sets in given shares: by samples or tokens, each in epochs of its own, resumed exactly."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data import DataPosition, build_mm_dataset
from mindspeed_mm.fsdp.data.dataloader.mixing import CYCLE, MixedSampler, MixShares, weighted_parts, whole_numbers
from mindspeed_mm.fsdp.data.dataloader.order import MicroBatch
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from tests.fsdp.data.buffered_data import Texts, loader, names_in, parts_of, steps_of_all
from tests.fsdp.data.conftest import conversation, write_jsonl

PARTS = parts_of(70, 10, 40)


def drawn(sampler: MixedSampler, count: int) -> list[Pick]:
    assert sampler.size is not None
    return [pick for n in range(0, count, 5) for pick in sampler.draw(*divmod(n, sampler.size), 5)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_shares_are_kept_in_every_cycle_and_nearly_all_along(shuffle: bool) -> None:
    sampler = MixedSampler(PARTS, [6, 1, 3], seed=4, shuffle=shuffle)
    picks = drawn(sampler, 2 * CYCLE)
    for start in (0, CYCLE):
        counts = Counter(next(p.name for p in PARTS if p.first <= pick.row < p.end) for pick in picks[start:][:CYCLE])
        assert counts == {"a": 0.6 * CYCLE, "b": 0.1 * CYCLE, "c": 0.3 * CYCLE}
    early = sum(pick.row < 70 for pick in picks[:500])
    assert early == 300 if not shuffle else 250 < early < 350


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_part_runs_through_epochs_of_its_own(shuffle: bool) -> None:
    picks = drawn(MixedSampler(PARTS, [1, 1, 1], seed=4, shuffle=shuffle), 3000)
    for part in PARTS:
        own = [pick for pick in picks if part.first <= pick.row < part.end]
        rows = part.end - part.first
        for epoch in range(len(own) // rows):
            taken = own[epoch * rows : (epoch + 1) * rows]
            assert {pick.epoch for pick in taken} == {epoch}
            assert sorted(pick.row for pick in taken) == list(range(part.first, part.end))
        orders = {tuple(p.row for p in own[e * rows : (e + 1) * rows]) for e in range(3)}
        assert len(orders) == (3 if shuffle else 1)


def test_a_draw_is_a_function_of_the_position_alone() -> None:
    whole = drawn(MixedSampler(PARTS, [6, 1, 3], seed=4), 1000)
    for start in (0, 17, 119, 120, 640):
        epoch, index = divmod(start, 120)
        again = MixedSampler(PARTS, [6, 1, 3], seed=4).draw(epoch, index, 50)
        assert again == whole[start : start + len(again)]
        assert len(again) == min(50, 120 - index)
    assert drawn(MixedSampler(PARTS, [6, 1, 3], seed=5), 100) != whole[:100]


def test_whole_numbers() -> None:
    assert whole_numbers([1, 1, 1], 10) == [4, 3, 3]
    assert whole_numbers([0.7, 0.3], 10) == [7, 3]
    assert whole_numbers([1e6, 1, 0], 10) == [9, 1, 0]
    assert whole_numbers([2.0], 10) == [10]


def test_weights() -> None:
    assert weighted_parts(PARTS, {"c": 1, "a": 2.5, "b": 0}) == ([PARTS[0], PARTS[2]], [2.5, 1.0])
    with pytest.raises(ConfigError, match=r"mix.weights.d  'd' is not an entry of dataset.* The entries are a, b, c"):
        weighted_parts(PARTS, {"a": 1, "d": 1})
    with pytest.raises(ConfigError, match="b, c has no weight"):
        weighted_parts(PARTS, {"a": 1})


def test_shares_by_tokens_and_what_is_achieved() -> None:
    lengths = [10] * 70 + [40] * 10 + [20] * 40
    mix = {"weights": {"a": 1, "b": 1, "c": 2}, "by": "tokens"}
    dataset = Texts(lengths, cutoff_len=64, packing=True, mix=mix)
    dataset.parts = PARTS
    data = loader(dataset, accumulation=4)
    steps = [batch for step in islice(data, 150) for batch in step]
    tokens = Counter[str]()
    for batch in steps:
        for name in batch["sample_ids"]:
            tokens[next(p.name for p in PARTS if p.first <= int(name) < p.end)] += lengths[int(name)]
    shares = {name: count / sum(tokens.values()) for name, count in tokens.items()}
    assert shares == pytest.approx({"a": 0.25, "b": 0.25, "c": 0.5}, abs=0.02)
    assert data.mix is not None
    assert data.mix.achieved() == pytest.approx(shares)


def test_blank_samples_do_not_count() -> None:
    shares = MixShares(PARTS)
    shares.count([MicroBatch((Pick(0, 0), Pick(0, 75), Pick(0, 75)), blank_rows=1)])
    assert shares.achieved() == {"a": 0.5, "b": 0.5, "c": 0.0}


def test_a_mix_resumes_with_the_very_next_sample() -> None:
    dataset = Texts([8] * 120, cutoff_len=64, mix={"weights": {"a": 6, "b": 1, "c": 3}})
    dataset.parts = PARTS
    whole = names_in(steps_of_all(dataset, 60, 1, micro=4))
    position, found = DataPosition(0, 0), []
    for ranks, steps in ((1, 7), (2, 20), (4, 33)):
        split = {"micro": 4 // ranks, "position": position}
        found += names_in(steps_of_all(dataset, steps, ranks, **split))
        first = loader(dataset, ranks=ranks, **split)
        list(islice(first, steps))
        position = DataPosition.from_dict(json.loads(json.dumps(first.position.to_dict())))
    assert found == whole


def test_real_files_of_different_formats(tmp_path: Path, param: Callable[..., DatasetParam]) -> None:
    write_jsonl(tmp_path / "chats.jsonl", [conversation(f"one {i}?", "two") for i in range(12)])
    write_jsonl(tmp_path / "tasks.jsonl", [{"q": f"three {i}?", "a": "four"} for i in range(6)])
    tasks: dict[str, Any] = {"path": "tasks.jsonl", "name": "tasks"}
    tasks["attr"] = {"formatting": "alpaca", "prompt": "q", "response": "a", "query": None}
    section = param("chats.jsonl")
    basic = section.basic_parameters.model_dump() | {
        "dataset": ["chats.jsonl", tasks],
        "mix": {"weights": {"chats.jsonl": 1, "tasks": 3}},
    }
    section = DatasetParam.model_validate(section.model_dump() | {"basic_parameters": basic})
    dataset, _ = build_mm_dataset(section)
    data = loader(dataset, micro=4, num_workers=1)
    names = [name for step in islice(data, 100) for batch in step for name in batch["sample_ids"]]
    assert sum(name.startswith("tasks") for name in names) == pytest.approx(300, abs=20)
    assert data.mix is not None and data.mix.achieved()["tasks"] == pytest.approx(0.75, abs=0.05)
    train, _ = build_mm_dataset(
        section.model_copy(update={"basic_parameters": section.basic_parameters.model_copy(update={"val_rate": 0.5})})
    )
    assert sum(part.end - part.first for part in train.parts) == len(train) == 9
    for part in train.parts:
        found = {dataset.place(0).file if part.name.startswith("chats") else "tasks.jsonl"}
        assert {train.place(i).file for i in range(part.first, part.end)} == found
