"""Which layers stand on which stage, and which stage on which rank. Pure: nothing is changed."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.core.patterns import is_inside
from mindspeed_mm.fsdp.models.structure.stages import KEY, CutPoints
from mindspeed_mm.fsdp.params.parallel_args import PpPlan
from mindspeed_mm.fsdp.utils.model_parts import shared_parameters

SPLIT_KEY = "parallel.pp_plan.split_points"
_NEEDS_TORCH = {"zbv": "2.13"}
"""Before, a backward pass in two parts counts a weight that is used twice more than once
(https://github.com/pytorch/pytorch/issues/180952)."""


@dataclass(frozen=True)
class StagePlan:
    """The stages of a model.

    Args:
        points: Where the model can be cut.
        borders: Number of the first layer of each further stage, that of layers for a stage behind all of them.
        layers: Their names, in the order in which they run.
        ranks: Of the pipeline.
        is_v: Stages go from the first rank to the last and back, instead of round and round.
    """

    points: CutPoints
    borders: tuple[int, ...]
    layers: tuple[str, ...]
    ranks: int
    is_v: bool = False

    @property
    def stages(self) -> int:
        """Number of stages, one more than there are borders."""
        return len(self.borders) + 1

    def layers_of(self, stage: int) -> range:
        """Numbers of a stage's layers."""
        edges = (0, *self.borders, len(self.layers))
        return range(edges[stage], edges[stage + 1])

    def rank_of(self, stage: int) -> int:
        """The rank that runs a stage."""
        lap, place = divmod(stage, self.ranks)
        goes_back = self.is_v and lap % 2 == 1
        if goes_back:
            return self.ranks - 1 - place
        return place

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank runs, in order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def owner(self, name: str) -> int:
        """The stage that has a module or parameter of the whole model, by its name."""
        last = self.stages - 1
        if name in self.points.behind_parameters or is_inside(name, self.points.behind):
            return last
        for number, layer in enumerate(self.layers):
            if is_inside(name, (layer,)):
                return bisect.bisect_right(self.borders, number)
        return 0

    def apart(self, first: str, others: Sequence[str]) -> list[str]:
        """Of the other names of a weight, those on another stage than its first."""
        return [name for name in others if self.owner(name) != self.owner(first)]

    def streams_into(self, stage: int) -> tuple[str, ...]:
        """The arguments by which hidden states enter a stage, of its first layer; none by name where it has no layers:
        they are the first argument of what is behind."""
        layers = self.layers_of(stage)
        if not layers:
            return ()
        list_name = self.layers[layers.start].rpartition(".")[0]
        return self.points.layers[list_name]

    def describe(self) -> str:
        """One line for the log: `2 stages of model.layers: 0-3 on rank 0, 4-7 on rank 1`."""
        parts = []
        for stage in range(self.stages):
            parts.append(f"{self._words(stage)} on rank {self.rank_of(stage)}")
        return f"{self.stages} stages of {self.points.list_names}: {', '.join(parts)}"

    def _words(self, stage: int) -> str:
        """Numbers of a stage's layers in their lists: `0-3`, of several lists `0-18 + 0-9`."""
        numbers: dict[str, list[str]] = {}
        for layer in self.layers_of(stage):
            list_name, _, number = self.layers[layer].rpartition(".")
            numbers.setdefault(list_name, []).append(number)
        runs = []
        for of_list in numbers.values():
            runs.append(of_list[0] if len(of_list) == 1 else f"{of_list[0]}-{of_list[-1]}")
        return " + ".join(runs) or "none"


def stages_per_rank(pp_plan: PpPlan) -> int:
    """Model chunks on a rank; a V has two."""
    if pp_plan.schedule == "zbv":
        return 2
    return pp_plan.virtual_stages


def plan_stages(model: nn.Module, points: CutPoints, ranks: int, pp_plan: PpPlan) -> StagePlan:
    """The stages of a whole model.

    Args:
        model: Built, parameters on meta or real, not cut.
        points: From `find_cut_points`.
        ranks: Of the pipeline.
        pp_plan: The section.

    Raises:
        ConfigError: There are more stages than layers, split points match nothing or are out of order, a stage would
            have no parameters, or more than two modules on different stages share a weight.
    """
    layers = layer_names(model, points)
    stages = ranks * stages_per_rank(pp_plan)
    if pp_plan.split_points:
        borders = _given_borders(pp_plan.split_points, points, layers, stages)
    else:
        _check_enough(len(layers), stages, ranks, points)
        borders = even_borders(*_costs(model, points), stages)
    plan = StagePlan(points, borders, layers, ranks, is_v=pp_plan.schedule == "zbv")
    _check_filled(model, plan)
    _check_ties(model, plan)
    return plan


def _check_ties(model: nn.Module, plan: StagePlan) -> None:
    """Two ends on different stages can share a weight, each with a copy of its own; more cannot."""
    for first, *others in shared_parameters(model):
        if len(others) > 1 and plan.apart(first, others):
            raise ConfigError(
                f"{first}, {', '.join(others)} are one weight on several stages: two ends can be tied, not more",
                key=KEY,
                way_out="Set it to 1.",
            )


def layer_names(model: nn.Module, points: CutPoints) -> tuple[str, ...]:
    """Names of all layers of a whole model, in the order in which they run."""
    names: list[str] = []
    for list_name in points.layers:
        names += [f"{list_name}.{number}" for number, _ in model.get_submodule(list_name).named_children()]
    return tuple(names)


def even_borders(layers: Sequence[int], front: int, back: int, stages: int) -> tuple[int, ...]:
    """Borders that make stages as equal as can be: the least sum of squared costs.

    Args:
        layers: Cost of each layer.
        front: Of what the first stage has in front of its layers.
        back: Of what the last stage has behind them.
        stages: How many, at most as many as layers. Every stage gets a layer; with split points the ends may have none.
    """
    sums = [0]
    for cost in layers:
        sums.append(sums[-1] + cost)
    # Stage by stage: best[e] = (sum of squares, borders) of the cheapest way for the stages so far to hold the layers
    # before e. How the stages after them are cut depends on e alone, so of each e only the cheapest way is kept.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(stages):
        later = stages - stage - 1
        # Each stage before has a layer, and each later one finds one.
        ends = range(stage + 1, len(layers) - later + 1)
        extra = 0
        if stage == 0:
            extra += front
        if later == 0:
            extra += back
            ends = range(len(layers), len(layers) + 1)
        extended = {}
        for end in ends:
            ways = []
            for start, (total, borders) in best.items():
                if start < end:
                    cost = sums[end] - sums[start] + extra
                    ways.append((total + cost**2, (*borders, end)))
            extended[end] = min(ways)
        best = extended
    return best[len(layers)][1][:-1]


def check_units(names: Collection[str], plan: StagePlan, key: str) -> None:
    """Raise `ConfigError` when one of these modules holds the list of layers: a stage leaves in the middle of it."""
    lists = tuple(plan.points.layers)
    for name in names:
        holds_layers = any(is_inside(list_name, (name,)) for list_name in lists)
        if not name or holds_layers:
            raise ConfigError(
                f"'{name}' holds the layers that stages are cut of",
                key=key,
                way_out=f"Name what is inside: '{lists[0]}.{{*}}'.",
            )


def _costs(model: nn.Module, points: CutPoints) -> tuple[list[int], int, int]:
    """Parameters of each layer, in front of and behind them: what a token is multiplied by. Looking an embedding up
    costs nothing."""
    layers = [_count_parameters(model, name) for name in layer_names(model, points)]
    back = sum(_count_parameters(model, name) for name in points.behind)
    elsewhere = (*points.layers, *points.behind, points.embedding)
    front = 0
    for name, parameter in model.named_parameters():
        if not is_inside(name, elsewhere):
            front += parameter.numel()
    return layers, front, back


def _count_parameters(model: nn.Module, name: str) -> int:
    return sum(parameter.numel() for parameter in model.get_submodule(name).parameters())


def _check_enough(layers: int, stages: int, ranks: int, points: CutPoints) -> None:
    if stages <= layers:
        return
    per_rank = stages // ranks
    most_ranks, most_chunks = layers // per_rank, layers // ranks
    what, key, ways = f"{ranks} ranks", KEY, []
    if per_rank > 1:
        what, key = f"{ranks} ranks × {per_rank} chunks on each", f"{KEY} · parallel.pp_plan.virtual_stages"
    if most_ranks > 1:
        ways.append(f"{KEY} to at most {most_ranks}")
    if 1 < most_chunks < per_rank:
        ways.append(f"parallel.pp_plan.virtual_stages to at most {most_chunks}")
    if per_rank > 1 and ranks <= layers:
        ways.append("parallel.pp_plan.schedule to 1f1b")
    if not ways:
        ways.append(f"{KEY} to 1")
    raise ConfigError(
        f"{what} are more stages than the {layers} layers of {points.list_names}",
        key=key,
        way_out=f"Set {', or '.join(ways)}.",
    )


def _given_borders(
    split_points: Sequence[str], points: CutPoints, layers: Sequence[str], stages: int
) -> tuple[int, ...]:
    if len(split_points) != stages - 1:
        raise ConfigError(
            f"{len(split_points)} split points make {len(split_points) + 1} stages, and the plan has {stages}",
            key=SPLIT_KEY,
            way_out=f"Name the first module of each further stage: {stages - 1} names, or leave it empty.",
        )
    places = {name: number for number, name in enumerate(layers)}
    last = f"Take {layers[0]} to {layers[-1]}"
    if all(len(streams) == 1 for streams in points.layers.values()):  # what is behind may read all that layers return
        places[points.behind[0]] = len(layers)
        last += f", or {points.behind[0]} for a last stage without layers"
    for name in split_points:
        if name not in places:
            raise ConfigError(
                f"'{name}' is not a module that a stage can begin with", key=SPLIT_KEY, way_out=f"{last}."
            )
    borders = tuple(places[name] for name in split_points)
    if any(first >= second for first, second in pairwise(borders)):
        raise ConfigError(
            f"{', '.join(split_points)} are not one behind the other: a stage between two would have no parameters",
            key=SPLIT_KEY,
            way_out="Order them as the model runs, each once.",
        )
    return borders


def _check_filled(model: nn.Module, plan: StagePlan) -> None:
    filled = {plan.owner(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    for stage in range(plan.stages):
        if stage not in filled:
            raise ConfigError(
                f"stage {stage} has no parameters", key=SPLIT_KEY, way_out="Give it a layer, or use fewer ranks."
            )


def is_schedule_right(name: str) -> bool:
    """Whether the installed torch computes a schedule's gradients right for every model."""
    return torch.__version__ >= _NEEDS_TORCH.get(name, "0")


def check_schedule(name: str) -> None:
    """Raise `MachineError` when the installed torch computes a schedule's gradients wrong."""
    if not is_schedule_right(name):
        raise MachineError(
            f"{name!r} needs torch {_NEEDS_TORCH[name]}, and {torch.__version__} is installed, "
            "whose gradients are wrong for weights that are used twice",
            key="parallel.pp_plan.schedule",
            way_out="Set interleaved1f1b with virtual_stages: 2, or 1f1b; or install a newer torch.",
        )
