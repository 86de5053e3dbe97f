"""The ledger: which sample is trained on in which step, over stops, workers, ranks, buffers and mixes."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from mindspeed_mm.fsdp.data import DataPosition
from mindspeed_mm.fsdp.data.dataloader import buffered
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick
from tests.fsdp.data.buffered_data import Texts, loader, mixed_lengths, parts_of, steps_of_all

LENGTHS = mixed_lengths(400)
MIX = {"weights": {"a": 3.0, "b": 1.0, "c": 1.0}}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"micro": 3}),
    "packed": ({"packing": True, "cutoff_len": 64}, {}),
    "packed, 2 rows' worth": ({"packing": True, "cutoff_len": 64}, {"micro": 2}),
    "budget": ({"cutoff_len": 64}, {"sampler_type": "TokenBudgetSampler", "max_tokens_per_batch": 160}),
    "budget of patches": (
        {"packing": True, "cutoff_len": 64},
        {"max_tokens_per_batch": 128, "max_patches_per_batch": 40},
    ),
    "similar lengths": ({"cutoff_len": 64}, {"sampler_type": "LengthGroupedSampler", "micro": 2}),
    "mixed": ({"packing": True, "cutoff_len": 64, "mix": MIX}, {}),
    "mixed, plain": ({"cutoff_len": 64, "mix": MIX}, {"micro": 2}),
    "mixed by tokens": ({"packing": True, "cutoff_len": 64, "mix": {**MIX, "by": "tokens"}}, {}),
    "in order": ({"packing": True, "cutoff_len": 64}, {"sampler_type": "SequentialSampler"}),
}
"""Name → settings of the data set, and of the loader."""


def texts(kind: str, **more: Any) -> Texts:
    dataset = Texts(LENGTHS, [n % 11 for n in range(400)], **KINDS[kind][0], **more)
    dataset.parts = parts_of(250, 50, 100)
    return dataset


def run(dataset: Texts, kind: str, legs: list[tuple[int, int, int, int]], **keys: Any) -> list[list[tuple[str, ...]]]:
    """A run in several starts: (steps, ranks, accumulation, workers) each; the position goes through JSON between."""
    ledger, position = [], DataPosition(0, 0)
    for steps, ranks, accumulation, workers in legs:
        split = {"accumulation": accumulation, "num_workers": workers, "position": position, **KINDS[kind][1], **keys}
        ledger += steps_of_all(dataset, steps, ranks, **split)
        first = loader(dataset, ranks=ranks, **split)
        list(islice(first, steps))
        position = DataPosition.from_dict(json.loads(json.dumps(first.position.to_dict())))
    return ledger


def order_of(dataset: Texts, kind: str, micro_batches: int, drop_last: bool) -> Any:
    keys = {"accumulation": micro_batches, "drop_last": drop_last, **KINDS[kind][1]}
    return loader(dataset, **keys).order


def ledger_of(dataset: Texts, kind: str, sizes: Sequence[int], drop_last: bool) -> tuple[list[Pick], DataPosition]:
    """Every sample trained on, with its epoch, by steps of so many micro-batches each; and the position at the end."""
    orders = {size: order_of(dataset, kind, size, drop_last) for size in sorted(set(sizes))}
    picks, position = [], DataPosition(0, 0)
    for size in sizes:
        planned = orders[size].step(position)
        assert len(planned.step) == size
        picks += [pick for batch in planned.step for pick in batch.picks]
        position = DataPosition.from_dict(json.loads(json.dumps(planned.after.to_dict())))
    return picks, position


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_one_sequence_over_stops_and_ranks(kind: str, drop_last: bool) -> None:
    dataset = texts(kind)
    whole = run(dataset, kind, [(16, 1, 4, 0)], drop_last=drop_last)
    legs = [(3, 4, 1, 0), (5, 2, 2, 0), (1, 1, 4, 0), (7, 2, 2, 0)]
    assert run(dataset, kind, legs, drop_last=drop_last) == whole


@pytest.mark.parametrize("kind", ["packed", "budget", "mixed"])
def test_one_sequence_over_workers(kind: str) -> None:
    dataset = texts(kind)
    whole = run(dataset, kind, [(8, 1, 2, 0)])
    assert run(dataset, kind, [(3, 1, 2, 2), (5, 2, 1, 1)]) == whole


@pytest.mark.parametrize("sizes", [[2] * 60, [2, 1, 3, 1, 1, 3, 2, 6] * 12, [1] * 5 + [3] * 45])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_and_nothing_comes_twice(kind: str, sizes: list[int]) -> None:
    """Also where the number of micro-batches of a step changes: 2 ranks to 1, 1 to 3."""
    dataset = texts(kind)
    picks, position = ledger_of(dataset, kind, sizes, drop_last=False)
    drawn = Counter([*picks, *position.pending])
    assert set(drawn.values()) == {1}
    if kind.startswith("mixed"):
        for part in dataset.parts:
            epochs = [Counter(p.epoch for p in drawn if part.first <= p.row < part.end)]
            rows = part.end - part.first
            assert all(count == rows for epoch, count in epochs[0].items() if epoch < max(epochs[0]))
        return
    assert len(drawn) == 400 * position.epoch + position.index
    assert sorted({pick.epoch for pick in drawn}) == list(range(position.epoch + (position.index > 0)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("mixed")])
def test_drop_last_leaves_out_less_than_a_step_of_an_epoch(kind: str) -> None:
    dataset = texts(kind)
    picks, position = ledger_of(dataset, kind, [4] * 60, drop_last=True)
    assert set(Counter(picks).values()) == {1}
    assert position.epoch >= 1
    # An epoch begins with what the one before has left out.
    assert all(later.epoch >= earlier.epoch - 1 for earlier, later in itertools.pairwise(picks))
    micro, most = KINDS[kind][1].get("micro", 1), order_of(dataset, kind, 4, True)
    for epoch in range(position.epoch):
        left = set(range(400)) - {pick.row for pick in picks if pick.epoch == epoch}
        if kind in ("plain", "similar lengths"):
            assert len(left) < 4 * micro
        else:
            shape = most.shape
            tokens, patches = (sum(each) for each in zip((0, 0), *((LENGTHS[n], n % 11) for n in left), strict=True))
            assert shape.load(len(left), tokens, patches) < 4


def test_the_oldest_sample_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that fit badly are in the next step once nothing older waits."""
    order, position = order_of(texts("packed"), "packed", 2, False), DataPosition(0, 0)
    longest, since = 0, dict[Pick, int]()
    for number in range(200):
        planned = order.step(position)
        taken = [pick for batch in planned.step for pick in batch.picks]
        if position.pending:
            assert position.pending[0] in taken
        for pick in planned.after.pending:
            longest = max(longest, number - since.setdefault(pick, number))
        position = planned.after
    assert longest < 40
    assert len(json.dumps(position.to_dict())) < 8000


@pytest.mark.parametrize("fault", ["lost", "twice"])
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = buffered._planned

    def faulty(buffer: Any, plan: Any) -> Any:
        planned = honest(buffer, plan)
        again = planned.step[0].picks[:1] if fault == "twice" else ()
        waiting = planned.after.pending[1:] if fault == "lost" else (*again, *planned.after.pending)
        return planned._replace(after=replace(planned.after, pending=waiting))

    monkeypatch.setattr(buffered, "_planned", faulty)
    with pytest.raises(AssertionError):
        test_nothing_is_lost_and_nothing_comes_twice("packed", [2] * 60)
