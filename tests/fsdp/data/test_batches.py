"""Micro-batches by size: hard caps, equal cost over ranks, bad samples, sizes found out in shares, counts of steps."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data import DataPosition, MMDataLoader, build_mm_dataloader
from mindspeed_mm.fsdp.data.data_utils.sample import SampleSize, TooLongError
from mindspeed_mm.fsdp.data.dataloader.planning import BatchShape, imbalance, nearest_in_cost
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick
from mindspeed_mm.fsdp.data.dataloader.sizes import Measurer, SizeBook
from mindspeed_mm.fsdp.params.data_args import DataloaderParam
from mindspeed_mm.tasks.check.batch import notes_on_epochs
from tests.fsdp.data.buffered_data import Texts, loader, mixed_lengths, names_in, steps_of_all
from tests.helpers.distributed import run_ranks

PACKED = {"packing": True, "cutoff_len": 64}
LENGTHS = mixed_lengths(400)


def realistic(count: int, most: int, seed: int = 0) -> list[SampleSize]:
    """Conversations with no picture, one or several, and some clips."""
    random, sizes = np.random.default_rng(seed), []
    for kind in random.random(count):
        text = int(np.clip(random.lognormal(5.5, 1.0), 8, most // 2))
        patches = 0 if kind < 0.4 else int(random.choice([256, 576, 1024, 2304]))
        if kind > 0.9:
            patches = int(random.integers(2000, 6000))
        sizes.append(SampleSize(min(most, text + patches // 4), patches))
    return sizes


def order_of(sizes: Sequence[SampleSize], ranks: int, cutoff_len: int, **keys: Any) -> Any:
    packs = keys.pop("packing", False)
    dataset = Texts([s.tokens for s in sizes], [s.patches for s in sizes], packing=packs, cutoff_len=cutoff_len)
    return loader(dataset, ranks=ranks, **keys).order


class TestShape:
    @pytest.mark.parametrize("patches", [None, 3000])
    @pytest.mark.parametrize("kind", ["packed", "padded", "rows"])
    def test_caps_are_hard_and_every_sample_is_dealt_once(self, kind: Any, patches: int | None) -> None:
        shape = BatchShape(kind, 4096, patches, rows=3 if kind == "rows" else 0, multiple=8)
        for seed in range(5):
            sizes = [size for size in realistic(200, 2048, seed) if shape.fits(size)]
            made = shape.micro_batches(np.array(sizes)).lists()
            assert sorted(i for each in made for i in each) == list(range(len(sizes)))
            for each in made:
                assert patches is None or sum(sizes[i].patches for i in each) <= patches
                tokens = [sizes[i].tokens for i in each]
                if kind == "packed":
                    assert sum(tokens) <= 4096
                elif kind == "padded":
                    assert len(each) * -(-max(tokens) // 8) * 8 <= 4096
                else:
                    assert len(each) <= 3
            count, tokens = len(sizes), sum(shape.padded(size.tokens) for size in sizes)
            assert len(made) >= shape.load(count, tokens, sum(size.patches for size in sizes))

    def test_what_is_hardly_filled_never_holds_the_oldest(self) -> None:
        for kind in ("packed", "padded"):
            shape = BatchShape(kind, 4096, multiple=8)
            for seed in range(20):
                sizes = realistic(150, 2048, seed)
                sizes[0] = SampleSize(9 + seed, 0)
                first = next(each for each in shape.micro_batches(np.array(sizes)).lists() if 0 in each)
                held = sum(sizes[i].tokens for i in first)
                assert held > 3500 if kind == "packed" else len(first) * max(sizes[i].tokens for i in first) > 2000

    def test_the_cost_by_hand(self) -> None:
        sizes = [SampleSize(1024, 100), SampleSize(2048, 0)]
        assert BatchShape("packed", 4096).cost(sizes) == 10 + 1024 * (1 + 1 / 16) + 2048 * (1 + 1 / 8)
        assert BatchShape("padded", 4096).cost(sizes) == 10 + 2 * 2048 * (1 + 1 / 8)

    def test_a_choice_holds_the_first_and_is_the_narrowest(self) -> None:
        costs = [5.0, 9.0, 1.0, 5.5, 5.2, 8.9, 1.1, 4.0]
        assert nearest_in_cost(costs, [0], 3) == [3, 4, 0]
        assert nearest_in_cost(costs, [2], 2) == [6, 2]
        assert nearest_in_cost(costs, [7], 2) == [0, 7]

    def test_imbalance_by_hand(self) -> None:
        assert imbalance([4.0, 2.0, 3.0, 3.0], ranks=2) == (4 + 3) / (3 + 3)
        assert imbalance([4.0, 2.0], ranks=1) == 1.0


class TestBalance:
    @pytest.mark.parametrize("mode", ["packed", "budget"])
    def test_eight_ranks_of_a_realistic_mix(self, mode: str) -> None:
        sizes = realistic(4000, 4096)
        keys = {"packing": True} if mode == "packed" else {"max_tokens_per_batch": 8192}
        order = order_of(sizes, 8, 4096, **keys)
        steps = islice(order.steps(DataPosition(0, 0)), 40)
        found = [imbalance([batch.cost for batch in planned.step], 8) for planned in steps]
        assert float(np.mean(found)) <= 1.05
        # The planted fault: the same samples as they come.
        costs = [size.tokens + 0.1 * size.patches for size in sizes]
        plain = [imbalance(np.add.reduceat(costs[i : i + 64], range(0, 64, 8)).tolist(), 8) for i in range(0, 3200, 64)]
        assert float(np.mean(plain)) > 1.2

    def test_packs_are_full(self) -> None:
        sizes = [SampleSize(n, 0) for n in mixed_lengths(3000, most=1024)]
        order, tokens = order_of(sizes, 4, 1024, packing=True), []
        for planned in islice(order.steps(DataPosition(0, 0)), 10):
            tokens += [sum(sizes[pick.row].tokens for pick in batch.picks) for batch in planned.step]
        assert sum(tokens) / len(tokens) / 1024 > 0.98

    def test_it_is_told(self) -> None:
        data = loader(Texts(LENGTHS, **PACKED), ranks=4)
        list(islice(data, 3))
        assert 1.0 <= data.take_metrics()["imbalance"] < 1.3
        assert data.take_metrics() == {}
        assert loader(Texts(LENGTHS), ranks=4).take_metrics() == {}


class TestBadSamples:
    KEYS = {"on_bad_sample": "skip", "max_bad_fraction": 0.1, **PACKED}

    @pytest.mark.parametrize("measuring_tells", [True, False])
    def test_they_are_left_out_of_their_micro_batch_and_counted(self, measuring_tells: bool) -> None:
        dataset = Texts(LENGTHS, bad=[3, 30, 31], measuring_tells=measuring_tells, **self.KEYS)
        whole = steps_of_all(dataset, 20, 1, accumulation=4)
        found = names_in(whole)
        assert not {3, 30, 31} & set(found)
        assert len(found) == len(set(found))
        assert steps_of_all(dataset, 20, 4) == whole
        assert steps_of_all(dataset, 20, 2, accumulation=2, num_workers=1) == whole
        ranks = [loader(dataset, rank=rank, ranks=2) for rank in range(2)]
        for data in ranks:
            list(islice(data, 60))
        assert {name for data in ranks for name in data.counts.bad} == {"3", "30", "31"}
        assert ranks[0].counts.bad["3"] == "rows.jsonl:3  sample 3 is broken" if measuring_tells else True

    @pytest.mark.parametrize("workers", [0, 1])
    def test_the_policy_error_stops_at_the_step_that_meets_it(self, workers: int) -> None:
        """However far ahead steps are planned."""
        in_order = {"shuffle": False, "num_workers": workers}
        data = loader(Texts([32] * 400, bad=[350], cutoff_len=64, packing=True), **in_order)
        steps = iter(data)
        # A step is made of 19 micro-batches of two samples: the bad one is met when the 351st is looked for.
        with pytest.raises(DataError, match=r"^rows.jsonl:350  sample 350 is broken. Leave such rows out"):
            for _ in range(200):
                next(steps)
        assert data.position.index == 350

    def test_too_many_are_an_error_on_every_rank(self) -> None:
        dataset = Texts(LENGTHS, bad=range(0, 400, 4), **{**self.KEYS, "max_bad_fraction": 0.01})
        for rank in range(2):
            with pytest.raises(DataError, match=r"5 of 400 samples are bad, more than 1.000%"):
                list(islice(loader(dataset, rank=rank, ranks=2), 50))

    def test_too_long_ones_are_dropped_and_counted_once(self) -> None:
        lengths = [100 if n % 10 == 0 else 16 for n in range(200)]
        ranks = [loader(Texts(lengths, **PACKED), rank=rank, ranks=2) for rank in range(2)]
        for data in ranks:
            assert not {str(n) for n in range(0, 200, 10)} & {
                name for step in islice(data, 20) for batch in step for name in batch["sample_ids"]
            }
        assert 12 <= sum(data.counts.too_long for data in ranks) <= 20
        with pytest.raises(TooLongError):
            list(islice(loader(Texts(lengths, truncation="error", **PACKED)), 20))

    def test_a_cap_below_a_sample_drops_it_by_the_same_policy(self) -> None:
        keys = {"sampler_type": "TokenBudgetSampler", "max_tokens_per_batch": 40}
        dataset = Texts([48 if n == 7 else 16 for n in range(100)], cutoff_len=64)
        data = loader(dataset, **keys)
        found = [name for step in islice(data, 60) for batch in step for name in batch["sample_ids"]]
        assert "7" not in found and data.counts.too_long >= 1
        strict = Texts(dataset.lengths, cutoff_len=64, truncation="error")
        with pytest.raises(TooLongError, match="48 tokens and 0 patches, and a micro-batch may hold 40 and any"):
            list(islice(loader(strict, **keys), 60))

    def test_a_micro_batch_that_would_be_empty_gets_a_replacement_that_fits(self) -> None:
        dataset = Texts([60] * 50, bad=range(0, 50, 5), measuring_tells=False, **{**self.KEYS, "max_bad_fraction": 1.0})
        steps = steps_of_all(dataset, 40, 1)
        assert all(len(batch) == 1 for step in steps for batch in step)
        assert steps == steps_of_all(dataset, 40, 1, num_workers=2)
        assert not {*range(0, 50, 5)} & set(names_in(steps))

    def test_a_data_set_of_nothing_usable_is_an_error(self) -> None:
        with pytest.raises(DataError, match=r"10 samples cannot be used, and none remains; the first: .*is broken"):
            next(iter(loader(Texts([9] * 10, bad=range(10), **{**self.KEYS, "max_bad_fraction": 1.0}))))
        with pytest.raises(DataError, match="has 3 samples, which do not fill the 4 micro-batches"):
            next(iter(loader(Texts([9] * 3, **PACKED), accumulation=4, drop_last=True)))
        some_bad = Texts([9] * 3, bad=[1], **PACKED | {"on_bad_sample": "skip", "max_bad_fraction": 1.0})
        with pytest.raises(DataError, match=r"of a step, and 1 of them cannot be used; .*Set drop_last: false"):
            next(iter(loader(some_bad, accumulation=4, drop_last=True)))


class TestLeftOver:
    """What an epoch leaves out goes first in the next one."""

    KINDS = {
        "packed": {"packing": True},
        "budget": {"sampler_type": "TokenBudgetSampler", "max_tokens_per_batch": 128},
        "grouped": {"sampler_type": "LengthGroupedSampler"},
    }

    def data(self, kind: str, rows: int = 37, **changes: Any) -> MMDataLoader:
        lengths = [*mixed_lengths(rows - 2, seed=3), 64, 63]
        keys = {**self.KINDS[kind], **changes}
        dataset = Texts(lengths, cutoff_len=64, packing=keys.pop("packing", False))
        return loader(dataset, **{"micro": 2, "drop_last": True, **keys})

    @pytest.mark.edge("N8")
    @pytest.mark.parametrize("kind", KINDS)
    def test_no_row_is_left_out_of_two_epochs_in_a_row_nor_taken_twice_in_one(self, kind: str) -> None:
        order, position, epochs = self.data(kind, accumulation=4).order, DataPosition(0, 0), 40
        met: list[list[int]] = [[] for _ in range(epochs + 1)]
        taken: list[Pick] = []
        while position.epoch < epochs:
            planned = order.step(position)
            position = planned.after
            picks = [pick for batch in planned.step for pick in batch.picks]
            taken += picks
            met[position.epoch] += [pick.row for pick in picks]
        assert len(set(taken)) == len(taken)
        for first, second, third in zip(met, met[1:], met[2:-1], strict=False):
            assert set(first + second + third) == set(range(37))
        left_out = [37 - len(set(rows)) for rows in met[:-1]]
        assert max(left_out) > 0, "or this shows nothing"

    @pytest.mark.edge("N8")
    @pytest.mark.parametrize("accumulation", [1, 4])
    @pytest.mark.parametrize("kind", KINDS)
    def test_without_leaving_any_out_every_row_comes_once_an_epoch(self, kind: str, accumulation: int) -> None:
        """What remains of an epoch is trained before the rows of the next one, which only fill up its steps."""
        data, position = self.data(kind, 150, accumulation=accumulation, drop_last=False), DataPosition(0, 0)
        counts, steps, largest = Counter[int](), 0, 0
        while min(counts.get(row, 0) for row in range(150)) < 3:
            planned = data.order.step(position)
            rows = [pick.row for batch in planned.step for pick in batch.picks]
            position, steps, largest = planned.after, steps + 1, max(largest, len(rows))
            counts.update(rows)
        assert set(counts.values()) <= {3, 4}
        assert counts.total() - 3 * 150 < largest
        assert abs(data.steps_for(3) - steps) <= 1

    @pytest.mark.edge("N8")
    @pytest.mark.parametrize("drop_last", [True, False])
    @pytest.mark.parametrize("kind", KINDS)
    def test_it_goes_on_from_any_step_under_any_number_of_ranks(self, kind: str, drop_last: bool) -> None:
        whole, position = [], DataPosition(0, 0)
        positions, order = [position], self.data(kind, 700, accumulation=4, drop_last=drop_last).order
        for _ in range(110):
            planned = order.step(position)
            position = DataPosition.from_dict(json.loads(json.dumps(planned.after.to_dict())))
            whole.append(planned.step)
            positions.append(position)
        begun = [number for number, each in enumerate(positions[1:]) if each.epoch > positions[number].epoch]
        assert begun, "or this shows nothing"
        assert any(each.carried for each in positions) == drop_last
        for ranks in (1, 2, 4):
            for number in (0, 7, begun[0], begun[-1]):
                accumulation = 4 // ranks
                order = self.data(kind, 700, ranks=ranks, accumulation=accumulation, drop_last=drop_last).order
                at = positions[number]
                for step in whole[number : number + 8]:
                    planned = order.step(at)
                    assert planned.step == step
                    at = planned.after


class TestStepsOfAnEpoch:
    @pytest.mark.parametrize("drop_last", [False, True])
    def test_they_are_exact_for_a_small_data_set(self, drop_last: bool) -> None:
        data = loader(Texts(LENGTHS, **PACKED), accumulation=2, drop_last=drop_last)
        steps = data.steps_for(1)
        order, position, count = data.order, DataPosition(0, 0), 0
        while True:
            position = order.step(position).after
            if position.epoch > 0:
                break
            count += 1
        assert count <= steps <= count + (not drop_last)
        assert data.estimate_note == ""
        assert data.describe() == f"400 samples, {steps} steps an epoch"

    @pytest.mark.parametrize(("micro", "rest"), [(3, 4), (5, 0), (9, 4)])
    def test_what_epochs_leave_out_at_their_ends_is_told(self, micro: int, rest: int) -> None:
        data = loader(Texts([16] * 40), accumulation=2, micro=micro, drop_last=True)
        position, taken = DataPosition(0, 0), 0
        while (planned := data.order.step(position)).after.epoch == 0:
            position, taken = planned.after, taken + sum(len(batch.picks) for batch in planned.step)
        assert 40 - taken == rest
        told = f", {rest} samples left out each time (drop_last)" if rest else ""
        assert data.describe() == f"40 samples, {40 // (2 * micro)} steps an epoch{told}"
        told = f"each epoch leaves out {rest} samples at its end, too few for a step (drop_last: false uses all)"
        assert list(notes_on_epochs(data)) == [told] * bool(rest)
        assert loader(Texts([16] * 40), accumulation=2, micro=micro).order.dropped == ""

    @pytest.mark.parametrize("basic", [PACKED, {}], ids=["packed", "rows"])
    def test_of_one_that_is_smaller_than_a_step_it_is_said_how_often_it_is_read(self, basic: dict[str, Any]) -> None:
        data = loader(Texts([16] * 4, **basic), accumulation=2, micro=1 if basic else 8)
        read = Counter(pick.row for batch in data.order.step(DataPosition(0, 0)).step for pick in batch.picks)
        times = 2 if basic else 4
        assert set(read.values()) == {times}
        told = f"an epoch fills only {1 / times:.0%} of a step, so each step reads the data about {times} times"
        assert data.repeat_note == told and told in data.describe()
        assert loader(Texts([16] * 16, **basic), accumulation=2, micro=1 if basic else 8).repeat_note == ""
        with pytest.raises(DataError, match="the data set has 4 samples"):
            next(iter(loader(Texts([16] * 4, **basic), accumulation=2, micro=1 if basic else 8, drop_last=True)))

    def test_of_a_large_one_the_beginning_is_measured(self) -> None:
        dataset = Texts(mixed_lengths(20_000), **PACKED)
        data = loader(dataset, accumulation=2)
        estimate = data.steps_for(1)
        assert len(dataset.measured) < 2500
        assert estimate == pytest.approx(sum(dataset.lengths) / 128, rel=0.05)
        assert "estimated" in data.estimate_note and "about" in data.describe()

    def test_where_all_sizes_are_known_they_are_exact(self) -> None:
        dataset = Texts(mixed_lengths(3000), **PACKED)
        dataset.known_sizes = lambda: np.array([[n, 0] for n in dataset.lengths])  # type: ignore[attr-defined]
        data = loader(dataset, accumulation=2)
        assert data.estimate_note == "" and dataset.measured == []
        order, position, count = data.order, DataPosition(0, 0), 0
        while position.epoch == 0 or position.overdue:
            position, count = order.step(position).after, count + 1
        assert count - 1 <= data.steps_for(1) <= count
        assert data.describe().startswith("3,000 samples, ") and "about" not in data.describe()

    def test_a_data_set_smaller_than_a_step(self) -> None:
        data = loader(Texts([10] * 8, **PACKED), accumulation=4)
        assert data.steps_for(3) == 1
        assert len(list(islice(data, 3))) == 3


class TestOnePass:
    @pytest.mark.parametrize("kind", ["packed", "padded"])
    def test_every_sample_counts_once(self, kind: str) -> None:
        dataset = Texts(LENGTHS[:101], cutoff_len=64, packing=kind == "packed")
        keys = {} if kind == "packed" else {"sampler_type": "TokenBudgetSampler", "max_tokens_per_batch": 128}
        counted: list[int] = []
        for rank in range(3):
            data = loader(dataset, rank=rank, ranks=3, **keys)
            steps = list(data.one_pass())
            assert {len(step) for step in steps} == {1}
            counted += [int(n) for (batch,) in steps for n in batch["shift_labels"].unique().tolist() if n >= 0]
            assert data.position == DataPosition(0, 0)
        assert sorted(counted) == list(range(101))

    def test_ranks_without_a_sample_have_a_blank_one(self) -> None:
        passes = [list(loader(Texts([9, 9], **PACKED), rank=rank, ranks=3).one_pass()) for rank in range(3)]
        labels = [[int((batch["shift_labels"] >= 0).sum()) for (batch,) in steps] for steps in passes]
        assert labels == [[9], [9], [0]]

    @pytest.mark.edge("N4", "N5")
    @pytest.mark.parametrize("kind", ["as they come", "packed", "grouped"])
    @pytest.mark.parametrize("measuring_tells", [True, False])
    def test_nothing_stands_in_for_what_cannot_be_used(self, kind: str, measuring_tells: bool) -> None:
        """Too long: 3 and 4, a micro-batch of their own; bad: 7 and 10. Ranks keep the same number of micro-batches."""
        lengths = [9, 8, 7, 70, 80, 6, 5, 4, 3, 2, 9]
        policy = {"on_bad_sample": "skip", "max_bad_fraction": 1.0, "cutoff_len": 64, "packing": kind == "packed"}
        keys = {"sampler_type": "LengthGroupedSampler"} if kind == "grouped" else {}
        for ranks, micro in ((1, 1), (1, 2), (2, 2), (3, 1), (4, 3)):
            counted: list[int] = []
            lengths_of_pass = set()
            for rank in range(ranks):
                dataset = Texts(lengths, bad=[7, 10], measuring_tells=measuring_tells, **policy)
                steps = list(loader(dataset, rank=rank, ranks=ranks, micro=micro, **keys).one_pass())
                lengths_of_pass.add(len(steps))
                for (batch,) in steps:
                    labels = batch["shift_labels"].unique().tolist()
                    counted += [row for row in labels if row >= 0]
                    is_blank = labels == [-100]
                    assert is_blank or kind == "packed" or len(batch["sample_ids"]) == len(set(labels) - {-100})
            assert sorted(counted) == [0, 1, 2, 5, 6, 8, 9]
            assert len(lengths_of_pass) == 1


def test_an_error_of_a_collator_names_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Texts, samples: Sequence[Any]) -> None:
        raise DataError("they do not fit")

    monkeypatch.setattr(Texts, "collate_fn", fail)
    data = loader(Texts([5, 6]), micro=2, sampler_type="SequentialSampler")
    with pytest.raises(DataError, match=r"^0, 1  they do not fit"):
        next(iter(data))


class TestSizes:
    def test_a_plugins_data_set_is_measured_by_encoding(self) -> None:
        dataset = Texts([5, 6, 7])
        del Texts.measure  # restored below
        try:
            assert Measurer(dataset, seed=0).size(2) == SampleSize(7, 0)
        finally:
            Texts.measure = measure  # type: ignore[method-assign]

    def test_a_measure_that_does_not_tell_tokens_from_patches_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A plain number would be taken as both."""
        monkeypatch.setattr(Texts, "measure", lambda _, index: 60)
        error = SizeBook(Measurer(Texts([5, 6]), 0)).of([1])[0]
        assert isinstance(error, DataError)
        assert re.search(r"measure of Texts returns 60.*SampleSize\(tokens, patches\), of mindspeed_mm", str(error))

    def test_they_are_kept_and_grow(self) -> None:
        dataset = Texts([n % 100 for n in range(5000)])
        book = SizeBook(Measurer(dataset, 0))
        assert [size.tokens for size in book.of([4999, 3, 3])] == [99, 3, 3]
        assert dataset.measured == [4999, 3]
        book.of([3, 4999])
        assert dataset.measured == [4999, 3]

    def test_what_is_known_beforehand_is_not_measured(self) -> None:
        dataset = Texts([5, 6, 7], bad=[1])
        book = SizeBook(Measurer(dataset, 0))
        book.learn(np.array([[5, 0], [0, 0], [7, 2]]))
        first, second, third = book.of([0, 1, 2])
        assert (first, third) == (SampleSize(5, 0), SampleSize(7, 2))
        assert isinstance(second, DataError) and dataset.measured == [1]

    def test_a_process_measures_ahead(self, tmp_path: Path) -> None:
        def note(index: int) -> None:
            (tmp_path / f"{index}").write_text(str(os.getpid()))

        dataset = Texts([7] * 40, act=note)
        book = SizeBook(Measurer(dataset, 0))
        with book.ahead():
            book.expect(np.arange(10))
            book.expect(np.arange(5, 20))
            deadline = time.monotonic() + 20
            while len(list(tmp_path.iterdir())) < 20 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(list(tmp_path.iterdir())) == 20
            assert book.of(range(20)) == [SampleSize(7, 0)] * 20
        assert os.getpid() not in {int(path.read_text()) for path in tmp_path.iterdir()}
        assert dataset.measured == []

    def test_a_process_that_dies_is_told_with_its_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mindspeed_mm.fsdp.data.dataloader.side_process._POLL_S", 0.1)
        book = SizeBook(Measurer(Texts([7] * 40, act=lambda i: os._exit(3) if i == 5 else None), 0))
        with (
            book.ahead(),
            pytest.raises(DataError, match=r"Texts  the process that measures samples died.* at 4, 5, 6"),
        ):
            book.of([4, 5, 6])

    def test_a_process_that_hangs_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mindspeed_mm.fsdp.data.dataloader.side_process._POLL_S", 0.1)
        book = SizeBook(Measurer(Texts([7], act=lambda i: time.sleep(60)), 0), timeout_s=0.3)
        with book.ahead(), pytest.raises(DataError, match="gave nothing for 0 s at 0"):
            book.of([0])

    def test_a_bug_of_a_plugin_comes_back(self) -> None:
        def act(index: int) -> None:
            raise KeyError("pixels")

        book = SizeBook(Measurer(Texts([7], act=act), 0))
        with book.ahead(), pytest.raises(DataError, match="KeyError: 'pixels', while measuring rows"):
            book.of([0])


measure = Texts.measure


def measure_in_shares(out: str) -> None:
    rank = dist.get_rank()
    dataset = Texts(LENGTHS, bad=[17], on_bad_sample="skip", max_bad_fraction=0.1, **PACKED)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  (it may have workers)
    found: dict[Any, Any] = {}
    for workers in (0, 1):
        data = build_mm_dataloader(
            dataset,
            DataloaderParam(num_workers=workers, drop_last=False),
            micro_batch_size=1,
            gradient_accumulation_steps=1,
            dp_rank=rank,
            dp_size=2,
            seed=5,
            group=dist.group.WORLD,
        )
        found[workers] = [batch["sample_ids"] for step in islice(data, 30) for batch in step]
    found |= {"measured": sorted(set(dataset.measured)), "bad": sorted(data.counts.bad)}
    (Path(out) / f"{rank}.json").write_text(json.dumps(found))


def test_two_ranks_measure_each_its_own_share(tmp_path: Path) -> None:
    run_ranks(2, measure_in_shares, str(tmp_path))
    one, two = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert not set(one["measured"]) & set(two["measured"])
    assert abs(len(one["measured"]) - len(two["measured"])) <= 32
    assert one["bad"] == two["bad"] == ["17"]
    dataset = Texts(LENGTHS, bad=[17], on_bad_sample="skip", max_bad_fraction=0.1, **PACKED)
    alone = [list(batch) for step in steps_of_all(dataset, 30, 2) for batch in step]
    for workers in ("0", "1"):
        assert [batch for pair in zip(one[workers], two[workers], strict=True) for batch in pair] == alone
