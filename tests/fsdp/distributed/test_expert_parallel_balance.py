"""Copies of busy experts: nobody's rows are lost, nobody holds more copies than allowed, and no rank gets fuller."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mindspeed_mm.fsdp.distributed.expert.dispatch import BalancePlan, plan_balance


def sends(plan: BalancePlan, loads: list[list[int]]) -> list[list[list[int]]]:
    """[source][rank][expert], put together from what each rank works out; senders and receivers agree."""
    sent, received = zip(*(plan.traffic_of(rank, np.array(loads)) for rank in range(len(loads))), strict=True)
    assert np.array_equal(np.stack(sent), np.stack(received, axis=1))
    return np.stack(sent).tolist()


def check_plan(loads: list[list[int]], most_copies: int) -> BalancePlan:
    plan = plan_balance(np.array(loads), most_copies)
    shares = plan.shares_RE.tolist()
    ranks, experts = len(loads), len(loads[0])
    own, total = experts // ranks, [sum(line[e] for line in loads) for e in range(experts)]
    assert [sum(line[e] for line in shares) for e in range(experts)] == total
    for rank, line in enumerate(shares):
        foreign = {e for e, share in enumerate(line) if share and e // own != rank}
        assert foreign <= set(plan.copies[rank]) and len(plan.copies[rank]) <= most_copies
    before = max(sum(total[rank * own : (rank + 1) * own]) for rank in range(ranks))
    assert max(map(sum, shares)) <= before
    table = sends(plan, loads)
    for source in range(ranks):
        assert [sum(table[source][rank][e] for rank in range(ranks)) for e in range(experts)] == loads[source]
    for rank in range(ranks):
        assert [sum(table[source][rank][e] for source in range(ranks)) for e in range(experts)] == shares[rank]
    return plan


def test_one_busy_expert_is_shared_evenly() -> None:
    plan = check_plan([[6, 0, 0, 0], [2, 0, 0, 0]], most_copies=1)
    assert plan.shares_RE.tolist() == [[4, 0, 0, 0], [4, 0, 0, 0]]
    assert plan.copies == ((), (0,))
    # Rows of the first source come first; they stay where the owner is.
    assert sends(plan, [[6, 0, 0, 0], [2, 0, 0, 0]]) == [
        [[4, 0, 0, 0], [2, 0, 0, 0]],
        [[0, 0, 0, 0], [2, 0, 0, 0]],
    ]


@pytest.mark.parametrize("loads", [[[3, 3], [3, 3]], [[0, 0], [0, 0]], [[1, 0], [0, 1]]])
def test_nothing_to_do(loads: list[list[int]]) -> None:
    assert check_plan(loads, most_copies=2).copies == ((), ())


def test_without_room_for_copies_nothing_moves() -> None:
    assert check_plan([[9, 0], [9, 0]], most_copies=0).shares_RE.tolist() == [[18, 0], [0, 0]]


def test_a_rank_takes_as_many_copies_as_it_may() -> None:
    loads = [[5, 5, 5, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
    few, many = check_plan(loads, most_copies=1), check_plan(loads, most_copies=2)
    assert [sum(line) for line in few.shares_RE] == [10, 5]
    assert [sum(line) for line in many.shares_RE] == [8, 7]


def test_any_loads() -> None:
    draw = random.Random(0)
    for _ in range(200):
        ranks, own = draw.choice([2, 3, 4, 8]), draw.choice([1, 2, 5])
        skew = draw.choice([1, 3, 30])
        loads = [[draw.randrange(20) * draw.choice([0, 1, skew]) for _ in range(ranks * own)] for _ in range(ranks)]
        check_plan(loads, draw.choice([0, 1, 2, 4]))


def test_with_room_for_all_ranks_come_out_even() -> None:
    loads = [[100, 7, 0, 3, 50, 1, 0, 2] for _ in range(4)]
    full = [sum(line) for line in check_plan(loads, most_copies=8).shares_RE]
    assert max(full) - min(full) <= 1
