"""Towers that encode the media of other ranks: of other samples, so that all have as much to do, or of the same
samples, where the decoder's layers or sequences are spread over ranks and the tower is not.

Two hooks around the tower: in front, pixels go to the ranks that the planner chose (`assign`), and behind, features
come back in the order in which the model asked for them, with their gradients (`travel.py`). Every rank calls the tower
equally often (`idle.py`), and what it brings to a call, pictures, clips or an idle tower's zeros, is shared among all.
A rank that is left with nothing encodes zeros, whose features are not used.

Media are never cut: the longest goes first, each to the team with the least to do (longest processing time first,
Graham 1969: the busiest has at most 4/3 of the least that is possible).
"""

from __future__ import annotations

import heapq
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mindspeed_mm.core.errors import ConfigError, MMError
from mindspeed_mm.fsdp.distributed.context.apply import groups_of
from mindspeed_mm.fsdp.distributed.context.towers import apply_to_tower, can_be_spread
from mindspeed_mm.fsdp.distributed.parallel_state import ParallelState
from mindspeed_mm.fsdp.distributed.towers.groups import build_sharing_group, build_team
from mindspeed_mm.fsdp.distributed.towers.travel import (
    Media,
    Trip,
    build_trip,
    carry,
    carry_features,
    feature_legs,
    gradient_legs,
    pixel_legs,
)
from mindspeed_mm.fsdp.ops.context_attention.layer import ContextGroups
from mindspeed_mm.fsdp.ops.context_attention.share import CONTEXT_KEY
from mindspeed_mm.fsdp.ops.forward_stack import Args, CallArguments, Kwargs
from mindspeed_mm.fsdp.ops.host_values import host_values, sent_with_values
from mindspeed_mm.fsdp.params.sizes.encoder import KEY, EncoderSizes
from mindspeed_mm.fsdp.utils.device import rng_state, set_rng_state
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

FEATURES = ("pooler_output", "deepstack_features")
"""What a decoder reads of a tower's output, a row for each merged square of patches."""


@dataclass(frozen=True)
class MediaSharing:
    """What is to be known of towers that encode the media of other ranks."""

    sizes: EncoderSizes
    towers: list[SharedMedia]

    def describe(self) -> str:
        """One line for the log."""
        return self.sizes.describe()

    def take_metrics(self) -> dict[str, float]:
        """How unevenly work was spread since it was last asked, in this rank's group: cost of the busiest over the
        mean, and what it had been with each rank's media at home. Host numbers."""
        total = Imbalance()
        for tower in self.towers:
            total.merge(tower.imbalance)
            tower.imbalance = Imbalance()
        return {"encoder_imbalance": total.ratio, "encoder_imbalance_at_home": total.ratio_at_home}


def share_media(model: nn.Module, towers: Collection[str], sizes: EncoderSizes, state: ParallelState) -> MediaSharing:
    """Let towers encode the media of a group of ranks, in place; call it before sharding, on every rank.

    Args:
        model: Built, not sharded.
        towers: Names of its towers.
        sizes: Who shares media.
        state: The job's groups.
    """
    group, team = build_sharing_group(state.sizes, sizes), build_team(state.sizes, sizes)
    follows_decoder = state.axis_size("cp") > 1 and sizes.parts == 1
    shared = []
    for tower in map(model.get_submodule, towers):
        if team is not None:
            apply_to_tower(tower)
        context = groups_of(state) if follows_decoder else team
        shared.append(SharedMedia(tower, sizes, group, context, in_step=state.axis_size("tp") > 1))
    return MediaSharing(sizes, shared)


def check_towers(model: nn.Module, towers: Collection[str], *, in_teams: bool) -> None:
    """Raise `ConfigError` unless the model has towers, all called with patches and their grids.

    Args:
        model: Built.
        towers: Names of its towers.
        in_teams: Several ranks are to share the patches of a medium.
    """
    what = "" if towers else "there is no tower"
    others = [name for name in towers if not takes_grids(model.get_submodule(name))]
    if others:
        what = f"{', '.join(others)} takes no patches of many media with their grids"
    if what:
        raise ConfigError(
            f"{type(model).__name__}: {what}", key=KEY, way_out="Leave the section out: the tower follows the decoder."
        )
    uncut = [name for name in towers if not can_be_spread(model.get_submodule(name))]
    if in_teams and uncut:
        raise ConfigError(
            f"{type(model).__name__}: the attention of {', '.join(uncut)} does not go over ranks",
            key=f"{KEY}.ring_attention_size · {KEY}.ulysses_parallel_size",
            way_out="Set both to 1.",
        )


def takes_grids(tower: nn.Module) -> bool:
    """Whether a tower is called with flat patches of many media, then their grids, and merges squares of patches."""
    merges_squares = attribute_at(tower, "config.spatial_merge_size") is not None
    return merges_squares and _parameters(tower)[1:2] == ["grid_thw"]


def _parameters(tower: nn.Module) -> list[str]:
    return list(inspect.signature(tower.forward).parameters)


class SharedMedia:
    """The hooks of one tower. What they keep between them is of the call that goes through the tower now.

    Args:
        tower: Takes (patches, grids); not sharded yet.
        sizes: Who shares media.
        group: Those ranks.
        context: Those that share the patches of a medium with this one, if any: a team, or the decoder's.
        in_step: Ranks of the group draw the same random numbers everywhere but in the tower, where they encode other
            media and so draw others, and other amounts.
    """

    def __init__(
        self,
        tower: nn.Module,
        sizes: EncoderSizes,
        group: dist.ProcessGroup,
        context: ContextGroups | None,
        *,
        in_step: bool,
    ) -> None:
        self._sizes, self._group, self._context, self._in_step = sizes, group, context, in_step
        self._random: dict[str, Tensor] = {}
        self._rank = group.rank()
        self._pixels_name = _parameters(tower)[0]
        self._side = int(attribute_at(tower, "config.spatial_merge_size"))
        self._widths = widths_of(attribute_at(tower, "config"))
        self._way_back: tuple[Trip, Trip] | None = None
        self.imbalance = Imbalance()
        """Imbalance of the calls since it was last replaced."""
        tower.register_forward_pre_hook(self._before, with_kwargs=True)
        tower.register_forward_hook(self._after)

    def _before(self, _: nn.Module, args: Args, kwargs: Kwargs) -> CallArguments:
        """Patches and grids of the media to encode here instead of the own ones."""
        given = {**dict(zip((self._pixels_name, "grid_thw"), args, strict=False)), **kwargs}
        pixels, grids = given.pop(self._pixels_name), given.pop("grid_thw")
        by_stream = self._all_grids(grids)
        media = self._plan(by_stream)
        pixels, grids_here = self._send_pixels(pixels, media, list(chain.from_iterable(by_stream)))
        given["grid_thw"] = sent_with_values([list(grid) for grid in grids_here], grids)
        given.pop(CONTEXT_KEY, None)  # of the text, if any; an idle tower gets none
        if self._context is not None:
            given[CONTEXT_KEY] = self._context
        if self._in_step:
            seed = int(torch.randint(2**62, ()))  # the same on all of them, another at each call
            self._random = rng_state()
            torch.manual_seed(seed + self._rank)
        return (pixels,), given

    def _after(self, tower: nn.Module, _: object, output: object) -> Any:
        """Features of the own media instead of those that were encoded here. All levels of features travel together,
        side by side, and are put back into an output of the same shape."""
        if self._in_step:
            set_rng_state(self._random)
        assert self._way_back is not None
        (there, back), self._way_back = self._way_back, None
        kept = output
        if isinstance(output, dict):
            kept = {name: output[name] for name in FEATURES if name in output}
        levels = tree_leaves(kept)
        has_features = bool(levels)
        for level in levels:
            has_features &= isinstance(level, Tensor) and level.dim() == 2 and len(level) == back.rows
        if not has_features:
            raise MMError(
                f"{type(tower).__name__} returns something else than a feature for each {self._side} × {self._side} "
                "patches",
                key=KEY,
                way_out="Leave the section out: the tower follows the decoder.",
            )
        travelled = carry_features(torch.cat(levels, dim=-1), there, back, self._group)
        own = iter(travelled.split([level.shape[-1] for level in levels], dim=-1))
        kept = tree_map(lambda _: next(own).contiguous(), kept)
        if isinstance(output, dict):
            return type(output)(**kept)
        return kept

    def _all_grids(self, grids: Tensor) -> list[list[Grid]]:
        """Gather the grids of the media of every stream, in the order of the streams."""
        own = [Grid(*map(int, grid)) for grid in host_values(grids)]
        if self._sizes.streams == 1:
            return [own]
        gathered: list[list[Grid]] = [[]] * self._sizes.ranks
        dist.all_gather_object(gathered, own, group=self._group)
        return gathered[:: self._ranks_per_stream]

    def _plan(self, by_stream: Sequence[Sequence[Grid]]) -> Media:
        """Which team encodes which medium; a medium's home is the team of the ranks that read it."""
        streams: list[int] = []
        costs: list[int] = []
        rows: list[int] = []
        for stream, grids in enumerate(by_stream):
            for grid in grids:
                streams.append(stream)
                costs.append(self._widths.cost(grid))
                rows.append(grid.patches // self._side**2)
        homes = [stream * self._ranks_per_stream // self._sizes.team for stream in streams]
        teams = assign(costs, homes, self._sizes.teams)
        self.imbalance.add(costs, homes, teams, self._sizes.teams)
        return Media(rows, streams, teams)

    @property
    def _ranks_per_stream(self) -> int:
        return self._sizes.parts * self._sizes.copies

    def _send_pixels(self, pixels: Tensor, media: Media, grids: Sequence[Grid]) -> tuple[Tensor, list[Grid]]:
        """The patches to encode here and their grids; how features come back is kept for `_after`."""
        sizes, unit = self._sizes, self._side**2
        brought = media.of_stream(self._rank // self._ranks_per_stream)
        encoded = media.of_team(self._rank // sizes.team)
        own, here = media.places(brought), media.places(encoded)
        rows_own, rows_here = sum(map(len, own.values())), sum(map(len, here.values()))
        ranks = (self._rank, sizes.ranks)
        out = build_trip(
            pixel_legs(media, sizes), *ranks, media.places(brought, unit), media.places(encoded, unit), rows_here * unit
        )
        there = build_trip(feature_legs(media, sizes), *ranks, here, own, rows_own)
        back = build_trip(gradient_legs(media, sizes), *ranks, own, here, max(rows_here, 1))
        self._way_back = there, back
        with torch.no_grad():
            arrived = carry(pixels, out, self._group)
        if encoded:
            return arrived, [grids[item] for item in encoded]
        return pixels.new_zeros(unit, *pixels.shape[1:]), [Grid(1, self._side, self._side)]


def widths_of(config: object) -> TowerWidths:
    """What the work of a tower depends on, from its configuration (where `embed_dim` is given, `hidden_size` is the
    decoder's)."""
    hidden = attribute_at(config, "embed_dim", attribute_at(config, "hidden_size", 0))
    mlp = attribute_at(config, "intermediate_size", attribute_at(config, "mlp_ratio", 4) * hidden)
    return TowerWidths(int(hidden), int(mlp))


# --- which team encodes which medium ----------------------------------------------------------------------------------


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
    if max(loads) >= max(team_loads(costs, homes, teams)):
        return list(homes)
    return taken


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
        if self.total:
            return self.busiest * self.teams / self.total
        return 1.0

    @property
    def ratio_at_home(self) -> float:
        """The same, had nothing travelled."""
        if self.total:
            return self.at_home * self.teams / self.total
        return 1.0
