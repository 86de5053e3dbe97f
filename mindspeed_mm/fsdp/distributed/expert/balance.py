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
        table = [[[0] * experts for _ in range(ranks)] for _ in range(ranks)]
        for expert in range(experts):
            held = _stretches([line[expert] for line in loads])
            computed = _stretches([line[expert] for line in self.shares])
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
    total = [sum(line[expert] for line in loads) for expert in range(experts)]
    shares = [[total[e] if e // own == rank else 0 for e in range(experts)] for rank in range(ranks)]
    full = [sum(line) for line in shares]
    most = -(-sum(full) // ranks)
    copies: list[set[int]] = [set() for _ in range(ranks)]
    while True:
        giver = max(range(ranks), key=lambda rank: full[rank])
        expert = max(range(giver * own, (giver + 1) * own), key=lambda e: shares[giver][e])
        takers = [r for r in range(ranks) if full[r] < most and (expert in copies[r] or len(copies[r]) < most_copies)]
        if full[giver] <= most or not takers:
            return BalancePlan(shares, tuple(tuple(sorted(held)) for held in copies))
        taker = min(takers, key=lambda rank: full[rank])
        moved = min(full[giver] - most, most - full[taker], shares[giver][expert])
        copies[taker].add(expert)
        shares[giver][expert] -= moved
        shares[taker][expert] += moved
        full[giver] -= moved
        full[taker] += moved


def _stretches(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise([0, *accumulate(lengths)]))
