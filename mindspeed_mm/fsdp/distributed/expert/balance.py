"""Copies of busy experts on idle ranks, planned anew for every call from what the router has chosen. Pure: no process
group is asked, and every rank that plans from the same loads comes to the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Table = list[list[int]]
"""Numbers by rank, then by expert."""


@dataclass(frozen=True)
class BalancePlan:
    """Who computes how many rows of which expert."""

    shares: Table
    """[rank][expert] rows that a rank computes, its own experts and copies."""
    copies: tuple[tuple[int, ...], ...]
    """[rank] experts of other ranks that a rank holds a copy of, in rising order."""

    def sends(self, loads: Table) -> list[Table]:
        """[source][rank][expert] rows that go from one rank to another.

        Rows of an expert are numbered through all sources, and cut into one stretch for each rank that computes some.
        """
        ranks, experts = len(loads), len(loads[0])
        table = [_zeros(ranks, experts) for _ in range(ranks)]
        for expert in range(experts):
            held = _stretches(_column(loads, expert))
            computed = _stretches(_column(self.shares, expert))
            for source, (begin, end) in enumerate(held):
                for rank, (first, last) in enumerate(computed):
                    table[source][rank][expert] = max(0, min(end, last) - max(begin, first))
        return table


def plan_balance(loads: Sequence[Sequence[int]], most_copies: int) -> BalancePlan:
    """Greedy: the fullest rank hands rows of its busiest expert to the emptiest one, until no rank is above the mean or
    none may hold another copy. Only an expert's owner hands on.

    Args:
        loads: [source][expert] rows that each rank's tokens have for each expert; ranks own equally many experts, rank
            0 the first ones.
        most_copies: Copies that a rank may hold.
    """
    ranks, experts = len(loads), len(loads[0])
    own = experts // ranks
    shares = _zeros(ranks, experts)
    for expert in range(experts):
        shares[expert // own][expert] = sum(_column(loads, expert))
    full = [sum(line) for line in shares]
    most = -(-sum(full) // ranks)
    copies: list[set[int]] = [set() for _ in range(ranks)]
    while True:
        giver = max(range(ranks), key=full.__getitem__)
        expert = max(range(giver * own, (giver + 1) * own), key=shares[giver].__getitem__)
        takers = []
        for rank in range(ranks):
            has_room = expert in copies[rank] or len(copies[rank]) < most_copies
            if full[rank] < most and has_room:
                takers.append(rank)
        if full[giver] <= most or not takers:
            return BalancePlan(shares, tuple(tuple(sorted(held)) for held in copies))
        taker = min(takers, key=full.__getitem__)
        moved = min(full[giver] - most, most - full[taker], shares[giver][expert])
        copies[taker].add(expert)
        shares[giver][expert] -= moved
        shares[taker][expert] += moved
        full[giver] -= moved
        full[taker] += moved


def _zeros(ranks: int, experts: int) -> Table:
    return [[0] * experts for _ in range(ranks)]


def _column(table: Sequence[Sequence[int]], expert: int) -> list[int]:
    return [line[expert] for line in table]


def _stretches(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise([0, *accumulate(lengths)]))
