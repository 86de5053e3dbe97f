"""Which team of ranks encodes which picture or clip. Pure, and the same on every rank.

Media are never cut: the longest goes first, each to the team with the least to do (longest processing time first,
Graham 1969: the busiest has at most 4/3 of the least that is possible).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Grid(NamedTuple):
    """Patches of a picture or clip before they are merged."""

    frames: int
    height: int
    width: int

    @property
    def patches(self) -> int:
        """Number of patches of all frames together."""
        return self.frames * self.height * self.width


@dataclass(frozen=True)
class TowerWidths:
    """What the work on a patch depends on."""

    hidden: int
    mlp: int

    def cost(self, grid: Grid) -> int:
        """Work on a medium, in multiplications by 2 · hidden a layer: four projections (4 h²), two of the MLP (2 h m),
        scores and values against the patches of the own frame (2 h n). Whole numbers: ranks must agree."""
        return grid.patches * (2 * self.hidden + self.mlp + grid.height * grid.width)


def assign(costs: Sequence[int], homes: Sequence[int], teams: int) -> list[int]:
    """The team of each item.

    Nothing moves where leaving all at home is as good; else no team is left without an item while there are enough.

    Args:
        costs: Above zero.
        homes: The team where an item is.
        teams: Their number.
    """
    taken, loads = [0] * len(costs), [0] * teams
    least_loaded = [(0, team) for team in range(teams)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        # Entries are not taken out when a load grows: those with another load than the present one are out of date.
        while least_loaded[0][0] != loads[least_loaded[0][1]]:
            heapq.heappop(least_loaded)
        least, team = least_loaded[0]
        team = homes[item] if loads[homes[item]] == least else team
        taken[item] = team
        loads[team] += costs[item]
        heapq.heappush(least_loaded, (loads[team], team))
    return list(homes) if max(loads) >= max(team_loads(costs, homes, teams)) else taken


def team_loads(costs: Sequence[int], taken: Sequence[int], teams: int) -> list[int]:
    """Cost of all that each team took."""
    loads = [0] * teams
    for cost, team in zip(costs, taken, strict=True):
        loads[team] += cost
    return loads


@dataclass
class Imbalance:
    """The busiest over the mean, over several calls: in each of them the others wait for the busiest."""

    busiest: int = 0
    at_home: int = 0
    """Work of the busiest rank, had nothing travelled."""
    total: int = 0
    teams: int = 1

    def add(self, costs: Sequence[int], homes: Sequence[int], taken: Sequence[int], teams: int) -> None:
        """Add one call: the cost of each item, the team where it was, and the team that encoded it."""
        self.busiest += max(team_loads(costs, taken, teams))
        self.at_home += max(team_loads(costs, homes, teams))
        self.total += sum(costs)
        self.teams = teams

    def merge(self, other: Imbalance) -> None:
        """Add the calls that were counted for another tower."""
        self.busiest += other.busiest
        self.at_home += other.at_home
        self.total += other.total
        self.teams = max(self.teams, other.teams)

    @property
    def ratio(self) -> float:
        """Busiest over mean; 1 is the best."""
        return self.busiest * self.teams / self.total if self.total else 1.0

    @property
    def ratio_at_home(self) -> float:
        """The same, had nothing travelled."""
        return self.at_home * self.teams / self.total if self.total else 1.0
