"""Steps of one size: nothing lost, nothing twice, the same on every split, balanced, exact on resume."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from mindspeed_mm.core.errors import CheckpointError, ConfigError, DataError
from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize
from mindspeed_mm.fsdp.data.dataloader import buckets
from mindspeed_mm.fsdp.data.dataloader.buckets import BucketOrder
from mindspeed_mm.fsdp.data.dataloader.order import DataPosition, Deal, Step

GEOMETRY = MediaGeometry(8, 4, (1, 2, 2), 16, is_video=True)
SIZES = [MediaSize(1, 32, 32), MediaSize(5, 32, 64), MediaSize(9, 64, 64), MediaSize(17, 64, 32)]
TOKENS = {size: GEOMETRY.tokens(GEOMETRY.latent_shape(size)) for size in SIZES}
DRAWN = np.random.default_rng(7).choice(4, size=211, p=[0.5, 0.3, 0.15, 0.05])
ROWS = [SIZES[n] for n in DRAWN]
SPLITS = [(1, 1, 3), (1, 4, 2), (2, 2, 2), (4, 1, 2), (3, 1, 5), (8, 2, 1)]


def order(
    dp_size: int = 2, accumulation: int = 2, micro: int = 2, rows: list[MediaSize] = ROWS, **changes: Any
) -> BucketOrder:
    return BucketOrder(rows, GEOMETRY, Deal(micro, accumulation, 0, dp_size), **{"seed": 3, **changes})


def epoch_of(found: BucketOrder, epoch: int = 0) -> list[Step]:
    taken = itertools.islice(found.steps(DataPosition(epoch, 0)), found.steps_per_epoch)
    return [planned.step for planned in taken]


def rows_of(steps: list[Step]) -> list[int]:
    """Rows that count, in their order."""
    batches = [micro_batch for step in steps for micro_batch in step]
    return [pick.row for batch in batches for pick in batch.picks[: len(batch.picks) - batch.blank_rows]]


def cost(step: Step) -> list[float]:
    found = []
    for micro_batch in step:
        each = TOKENS[ROWS[micro_batch.picks[0].row]]
        found.append((len(micro_batch.picks) - micro_batch.blank_rows) * each * (1 + each / buckets.ATTENTION_TOKENS))
    return found


@pytest.mark.parametrize("tokens", [None, 96])
@pytest.mark.parametrize("split", SPLITS)
class TestEveryEpoch:
    def test_takes_every_sample_once(self, split: tuple[int, int, int], tokens: int | None) -> None:
        found = order(*split, max_tokens=tokens)
        for epoch in range(3):
            steps = epoch_of(found, epoch)
            assert sorted(rows_of(steps)) == list(range(211))
            assert {pick.epoch for step in steps for batch in step for pick in batch.picks} == {epoch}
        assert found.step(DataPosition(0, 211))[1].epoch == 1

    def test_has_micro_batches_of_one_size_as_many_on_every_rank(
        self, split: tuple[int, int, int], tokens: int | None
    ) -> None:
        dp_size, accumulation, micro = split
        for step in epoch_of(order(*split, max_tokens=tokens)):
            assert len(step) == dp_size * accumulation
            for batch in step:
                (size,) = {ROWS[pick.row] for pick in batch.picks}
                assert 1 <= len(batch.picks) <= (micro if tokens is None else 96 // TOKENS[size])
                assert batch.blank_rows in (0, len(batch.picks))

    def test_drops_less_than_a_step_and_others_each_time(self, split: tuple[int, int, int], tokens: int | None) -> None:
        found, whole = order(*split, max_tokens=tokens, drop_last=True), order(*split, max_tokens=tokens)
        missing = []
        for epoch in range(6):
            steps = epoch_of(found, epoch)
            taken = rows_of(steps)
            assert len(set(taken)) == len(taken)
            assert not any(batch.blank_rows for step in steps for batch in step)
            missing.append(frozenset(range(211)) - set(taken))
        most = max(bucket.rows for bucket in found.buckets)
        assert max(map(len, missing)) < most * split[0] * split[1]
        if found.steps_per_epoch < whole.steps_per_epoch:
            assert len(set(missing)) > 1
            assert not frozenset.intersection(*missing)


def test_the_order_is_a_function_of_seed_and_epoch_and_steps_do_not_depend_on_ranks() -> None:
    first = epoch_of(order(2, 1))
    assert epoch_of(order(2, 1)) == first
    assert epoch_of(order(1, 2)) == first
    assert epoch_of(order(2, 1), 1) != first
    assert epoch_of(order(2, 1, seed=4)) != first
    in_order = rows_of(epoch_of(order(1, 1, 211, shuffle=False)))
    grouped = sorted(range(211), key=lambda row: (min(np.flatnonzero(DRAWN[row] == DRAWN)), row))
    assert in_order == grouped


def test_ranks_get_their_own_micro_batches() -> None:
    step = order(2, 2).step(DataPosition(0, 0)).step
    dealt = [Deal(2, 2, rank, 2).mine(step) for rank in range(2)]
    assert [part for pair in zip(*dealt, strict=True) for part in pair] == step


def test_most_steps_have_one_size_and_mixed_ones_nearly_one_cost() -> None:
    steps = epoch_of(order(4, 1, 2))
    mixed = [step for step in steps if len({ROWS[batch.picks[0].row] for batch in step}) > 1]
    assert 0 < len(mixed) <= len(SIZES)
    costs = [cost(step) for step in steps]
    assert float(np.mean([max(each) / np.mean(each) for each in costs])) < 1.1
    # The planted fault: the same samples in steps that do not look at sizes keep ranks waiting.
    shuffled = np.random.default_rng(0).permutation([TOKENS[size] for size in ROWS])[:208].reshape(-1, 4, 2).sum(2)
    assert float((shuffled.max(1) / shuffled.mean(1)).mean()) > 1.3


@pytest.mark.parametrize("drop_last", [False, True])
def test_resume_at_any_step_under_another_number_of_ranks(drop_last: bool) -> None:
    whole = order(4, 1, drop_last=drop_last)
    position, expected = (
        DataPosition(0, 0),
        [planned.step for planned in itertools.islice(whole.steps(DataPosition(0, 0)), 70)],
    )
    for number in range(70):
        other = order(*[(4, 1), (2, 2), (1, 4)][number % 3], drop_last=drop_last)
        restored = DataPosition.from_dict(position.to_dict())
        assert other.step(restored)[0] == expected[number]
        position = whole.step(position).after
    assert position.epoch > 1


def test_a_position_of_other_batches_is_refused() -> None:
    position = order(2, 2, 2).step(DataPosition(0, 0)).after
    with pytest.raises(CheckpointError, match="sample 8 of epoch 0 begins no step"):
        order(2, 2, 3, rows=[SIZES[0]] * 211).step(position)
    assert order(2, 2, 2).batching == order(1, 4, 2).batching
    assert order(2, 2, 2).batching != order(2, 2, 3).batching
    assert order(2, 2, 2).batching != order(2, 2, 2, max_tokens=500).batching


@pytest.mark.edge("G10")
class TestAnotherSplitOfTheSameBatch:
    """Steps of the same number of samples, dealt into other micro-batches."""

    @staticmethod
    def resumed(rows: list[MediaSize], steps: int, *, may_skip: bool = False) -> tuple[list[int], list[int], str]:
        """Rows that were trained before, and after, in the epoch that it was stopped in or behind; and the note."""
        saved, today = order(2, 2, 2, rows=rows), order(1, 2, 4, rows=rows)
        taken = list(itertools.islice(saved.steps(DataPosition(0, 0)), steps))
        position, note = today.go_on(taken[-1].after, saved.batching, may_skip=may_skip)
        following = []
        for planned in today.steps(position):
            if planned.step[0].picks[0].epoch != position.epoch:
                break
            following.append(planned.step)
        return rows_of([planned.step for planned in taken]), rows_of(following), note

    @pytest.mark.parametrize("rows", [[SIZES[0]] * 52, [SIZES[0]] * 40 + [SIZES[2]] * 16], ids=["one size", "whole"])
    def test_goes_on_where_it_is_exact(self, rows: list[MediaSize]) -> None:
        for steps in range(1, len(rows) // 8):
            done, after, note = self.resumed(rows, steps)
            assert sorted(done + after) == list(range(len(rows)))
            assert note == ""

    def test_goes_on_with_the_next_epoch_at_an_epochs_end(self) -> None:
        steps = order(2, 2, 2).steps_per_epoch
        done, after, note = self.resumed(ROWS, steps)
        assert sorted(done) == sorted(after) == list(range(211))
        assert note == ""
        drops = [order(*split, drop_last=True) for split in ((2, 2, 2), (1, 2, 4))]
        end = list(itertools.islice(drops[0].steps(DataPosition(0, 0)), drops[0].steps_per_epoch))[-1].after
        assert drops[1].go_on(end, drops[0].batching, may_skip=False) == (DataPosition(1, 0), "")

    def test_is_refused_within_an_epoch_whose_steps_are_others_or_skips_the_rest(self) -> None:
        """Sizes whose numbers are not a multiple of the batch leave samples that later micro-batches combine again."""
        kept, refused = 0, 0
        for steps in range(1, order(2, 2, 2).steps_per_epoch):
            try:
                done, after, note = self.resumed(ROWS, steps)
                kept += 1
                assert (sorted(done + after), note) == (list(range(211)), "")
            except CheckpointError as error:
                refused += 1
                assert error.problems[0].key == "training.micro_batch_size"
                done, after, note = self.resumed(ROWS, steps, may_skip=True)
                assert str(error.problems[0]).count(f"{211 - len(done)} samples of epoch 0 are left") == 1
                assert "--accept-data-change" in str(error)
                assert note.startswith(f"the run goes on with epoch 1: {211 - len(done)} samples of epoch 0")
                assert sorted(after) == list(range(211))
        assert kept > 3 < refused

    def test_changed_data_go_on_with_the_next_epoch_where_no_step_begins(self) -> None:
        fewer = order(2, 2, 2, rows=ROWS[:100])
        position, note = fewer.go_on(DataPosition(0, 13), fewer.batching, may_skip=True)
        assert position == DataPosition(1, 0)
        assert "87 samples of epoch 0 are left out" in note


def test_the_token_budget_is_filled_and_kept() -> None:
    found = order(1, 1, max_tokens=100)
    rows = {bucket.size: bucket.rows for bucket in found.buckets}
    assert rows == {size: 100 // tokens for size, tokens in TOKENS.items()}
    assert found.most_pixels == max(n * s.frames * s.height * s.width for s, n in rows.items())
    with pytest.raises(ConfigError, match=r"max_tokens_per_batch  a sample of 9×64×64 has 48 tokens, more than 47"):
        order(max_tokens=47)


def test_too_few_samples() -> None:
    few = [SIZES[0]] * 3 + [SIZES[1]]
    with pytest.raises(DataError, match="has 4 samples, too few for 4 micro-batches"):
        order(4, 1, 3, rows=few, drop_last=True)
    (step,) = epoch_of(order(4, 1, 3, rows=few))
    assert sorted(rows_of([step])) == [0, 1, 2, 3]
    assert [batch.blank_rows for batch in step] == [0, 0, 0, 0]
    (step,) = epoch_of(order(8, 1, 3, rows=few))
    assert sorted(rows_of([step])) == [0, 1, 2, 3]
    assert [batch.blank_rows for batch in step] == [0] * 4 + [1] * 4
    assert all(len(batch.picks) == 1 for batch in step)
    with pytest.raises(DataError, match="has 0 samples"):
        order(rows=[])


def test_one_pass_has_every_sample_once_and_equally_many_micro_batches() -> None:
    found = order(3, 1, 4, drop_last=True)
    steps = [planned.step for planned in found.one_pass()]
    assert Counter(rows_of(steps)) == Counter(range(211))
    assert {len(step) for step in steps} == {3}
    assert steps == [planned.step for planned in found.one_pass()]
    assert {pick.epoch for step in steps for batch in step for pick in batch.picks} == {0}


def test_a_position_beyond_fewer_data_goes_on_with_the_next_epoch() -> None:
    found = order(rows=ROWS[:100])
    assert found.step(DataPosition(2, 205)) == found.step(DataPosition(3, 0))


def test_steps_of_several_epochs() -> None:
    found = order()
    assert found.steps_for(2) == 2 * found.steps_per_epoch
    assert found.steps_for(0.5) == -(-found.steps_per_epoch // 2)


@pytest.mark.parametrize("fault", ["lost", "twice"])
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order that forgets a leftover, or takes one twice, fails the first test above."""
    honest = BucketOrder._group

    def faulty(self: BucketOrder, order: np.ndarray) -> Any:
        whole, leftovers = honest(self, order)
        return whole, leftovers[1:] if fault == "lost" else [*leftovers, leftovers[0]]

    assert sorted(rows_of(epoch_of(order()))) == list(range(211))
    monkeypatch.setattr(BucketOrder, "_group", faulty)
    assert sorted(rows_of(epoch_of(order()))) != list(range(211))


def test_a_large_data_set_is_laid_out_in_no_time() -> None:
    import time

    drawn = np.random.default_rng(1).integers(0, 4, 300_000)
    found = order(8, 1, 1, rows=[SIZES[n] for n in drawn])
    started = time.perf_counter()
    found.step(DataPosition(0, 0))
    assert time.perf_counter() - started < 20
