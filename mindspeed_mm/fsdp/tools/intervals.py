"""Sets of moments as sorted intervals without overlaps: unions, intersections, differences, lengths.

An interval set is a float array of shape (n, 2), rows [begin, end), each begin after the end before it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]
Times = NDArray[np.float64]

NONE: Intervals = np.empty((0, 2))


def union(begins: Times, ends: Times) -> Intervals:
    """The moments that at least one of the stretches covers; stretches may overlap and come in any order."""
    keep = ends > begins
    begins, ends = begins[keep], ends[keep]
    if not len(begins):
        return NONE
    order = np.argsort(begins, kind="stable")
    # How far all that has begun reaches: what begins later starts an interval of its own.
    begins, reached = begins[order], np.maximum.accumulate(ends[order])
    starts = np.concatenate(([True], begins[1:] > reached[:-1]))
    firsts = np.flatnonzero(starts)
    lasts = np.concatenate((firsts[1:] - 1, [len(begins) - 1]))
    return np.column_stack((begins[firsts], reached[lasts]))


def merged(*sets: Intervals) -> Intervals:
    """The moments of any of the sets."""
    together = np.concatenate(sets) if sets else NONE
    return union(together[:, 0], together[:, 1])


def length(intervals: Intervals) -> float:
    """Return the time that all intervals cover together."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def minus(one: Intervals, other: Intervals) -> Intervals:
    """The moments of `one` that are not in `other`."""
    if not len(one) or not len(other):
        return one
    # The gaps of `other`, and what lies before and behind all of it.
    outside = np.column_stack((np.concatenate(([-np.inf], other[:, 1])), np.concatenate((other[:, 0], [np.inf]))))
    return common(one, outside)


def common(one: Intervals, other: Intervals) -> Intervals:
    """Return the moments that are in both sets, as an interval set."""
    if not len(one) or not len(other):
        return NONE
    # For each of `one`, the range of `other` that touches it; then all pairs at once.
    first = np.searchsorted(other[:, 1], one[:, 0], side="right")
    last = np.searchsorted(other[:, 0], one[:, 1], side="left")
    counts = np.maximum(last - first, 0)
    mine = np.repeat(np.arange(len(one)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    theirs = first[mine] + within
    begins = np.maximum(one[mine, 0], other[theirs, 0])
    ends = np.minimum(one[mine, 1], other[theirs, 1])
    return np.column_stack((begins, ends))[ends > begins]


def locate(intervals: Intervals, moments: Times) -> NDArray[np.int64]:
    """For each moment the number of the interval that it is in; -1: none."""
    at = np.searchsorted(intervals[:, 0], moments, side="right") - 1
    inside = at >= 0
    inside[inside] = moments[inside] < intervals[at[inside], 1]
    return np.where(inside, at, -1)
