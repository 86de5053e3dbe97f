"""Interval arithmetic against the same thing moment by moment."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mindspeed_mm.fsdp.tools import intervals

LENGTH = 60


def covered(pairs: list[tuple[int, int]]) -> set[int]:
    return {moment for begin, end in pairs for moment in range(begin, end)}


def made(pairs: list[tuple[int, int]]) -> intervals.Intervals:
    array = np.array(pairs, dtype=float).reshape(-1, 2)
    return intervals.union(array[:, 0], array[:, 1])


def moments(found: intervals.Intervals) -> set[int]:
    assert all(begin < end for begin, end in found)
    assert all(left[1] < right[0] for left, right in pairwise(found)), "not apart"
    return covered([(int(begin), int(end)) for begin, end in found])


@pytest.mark.parametrize("seed", range(60))
def test_every_operation_equals_its_set_of_moments(seed: int) -> None:
    draw = np.random.default_rng(seed)

    def pairs() -> list[tuple[int, int]]:
        begins = draw.integers(0, LENGTH, size=draw.integers(0, 9))
        return [(int(b), int(b + draw.integers(0, 9))) for b in begins]

    one, other = pairs(), pairs()
    a, b = made(one), made(other)
    assert moments(a) == covered(one)
    assert intervals.length(a) == len(covered(one))
    assert moments(intervals.merged(a, b)) == covered(one) | covered(other)
    # Pieces that touch are joined by `union`; differences and intersections keep them as they are.
    assert covered([(int(x), int(y)) for x, y in intervals.minus(a, b)]) == covered(one) - covered(other)
    assert covered([(int(x), int(y)) for x, y in intervals.common(a, b)]) == covered(one) & covered(other)
    inside = intervals.locate(a, np.arange(LENGTH, dtype=float)) >= 0
    assert {m for m in range(LENGTH) if inside[m]} == {m for m in covered(one) if m < LENGTH}


def test_a_planted_fault_is_noticed() -> None:
    """Adding up lengths without joining overlaps is what must not happen."""
    pairs = [(0, 5), (2, 4), (3, 9)]
    assert sum(end - begin for begin, end in pairs) != intervals.length(made(pairs)) == 9
