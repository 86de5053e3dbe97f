"""Which layers stand on which stage, and which stage on which rank. Pure: nothing is changed and nobody is asked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.structure.cut_points import KEY, CutPoints
from mindspeed_mm.fsdp.params.parallel_args import PpPlan

SPLIT_KEY = "parallel.pp_plan.split_points"


@dataclass(frozen=True)
class StagePlan:
    """The stages of a model.

    Args:
        points: Where the model can be cut.
        borders: Number of the first layer of each further stage, `layers` for a stage behind all of them.
        layers: How many there are.
        ranks: Of the pipeline.
        is_v: Stages go from the first rank to the last and back, instead of round and round.
    """

    points: CutPoints
    borders: tuple[int, ...]
    layers: int
    ranks: int
    is_v: bool = False

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.borders) + 1

    def layers_of(self, stage: int) -> range:
        """Numbers of a stage's layers."""
        edges = (0, *self.borders, self.layers)
        return range(edges[stage], edges[stage + 1])

    def rank_of(self, stage: int) -> int:
        """The rank that runs a stage."""
        lap, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.is_v and lap % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank runs, in order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def owner(self, name: str) -> int:
        """The stage that has a module or parameter of the whole model, by its name."""
        last = self.stages - 1
        if name in self.points.behind_parameters or any(_is_in(name, module) for module in self.points.behind):
            return last
        if not name.startswith(f"{self.points.layers}."):
            return 0
        layer = int(name.removeprefix(f"{self.points.layers}.").partition(".")[0])
        return next(stage for stage in range(self.stages) if layer in self.layers_of(stage))

    def describe(self) -> str:
        """One line for the log: `2 stages of model.layers: 0-3 on rank 0, 4-7 on rank 1`."""
        parts = [f"{_words(self.layers_of(stage))} on rank {self.rank_of(stage)}" for stage in range(self.stages)]
        return f"{self.stages} stages of {self.points.layers}: {', '.join(parts)}"


def stages_per_rank(pp_plan: PpPlan) -> int:
    """Model chunks on a rank; a V has two."""
    return 2 if pp_plan.schedule == "zbv" else pp_plan.virtual_stages


def plan_stages(model: nn.Module, points: CutPoints, ranks: int, pp_plan: PpPlan) -> StagePlan:
    """The stages of a whole model.

    Args:
        model: Built, parameters on meta or real, not cut.
        points: From `find_cut_points`.
        ranks: Of the pipeline.
        pp_plan: The section.

    Raises:
        ConfigError: There are more stages than layers, split points match nothing or are out of order, or a stage would
            have no parameters.
    """
    layers = len(model.get_submodule(points.layers))  # type: ignore[arg-type]
    stages = ranks * stages_per_rank(pp_plan)
    if pp_plan.split_points:
        borders = _given_borders(pp_plan.split_points, points, layers, stages)
    else:
        _check_enough(layers, stages, ranks, points)
        borders = even_borders(*_costs(model, points), stages)
    plan = StagePlan(points, borders, layers, ranks, is_v=pp_plan.schedule == "zbv")
    _check_filled(model, plan)
    return plan


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
        is_last, later = stage == stages - 1, stages - stage - 1
        extra = (front if stage == 0 else 0) + (back if is_last else 0)
        # Each stage before has a layer, and each later one finds one.
        ends = [len(layers)] if is_last else range(stage + 1, len(layers) - later + 1)
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
    around = [name for name in names if f"{plan.points.layers}.".startswith(f"{name}.") or not name]
    if around:
        raise ConfigError(
            f"'{around[0]}' holds the layers that stages are cut of",
            key=key,
            way_out=f"Name what is inside: '{plan.points.layers}.{{*}}'.",
        )


def _costs(model: nn.Module, points: CutPoints) -> tuple[list[int], int, int]:
    """Parameters of each layer, in front of and behind them: what a token is multiplied by. Looking an embedding up
    costs nothing."""
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.get_submodule(points.layers).children()]
    back = sum(p.numel() for name in points.behind for p in model.get_submodule(name).parameters())
    front = sum(
        p.numel()
        for name, p in model.named_parameters()
        if not any(_is_in(name, part) for part in (points.layers, *points.behind, points.embedding))
    )
    return layers, front, back


def _check_enough(layers: int, stages: int, ranks: int, points: CutPoints) -> None:
    if stages <= layers:
        return
    per_rank = stages // ranks
    most_ranks, most_chunks = layers // per_rank, layers // ranks
    ways = [f"{KEY} to at most {most_ranks}"] if most_ranks > 1 else []
    ways += [f"parallel.pp_plan.virtual_stages to at most {most_chunks}"] if 1 < most_chunks < per_rank else []
    ways += ["parallel.pp_plan.schedule to 1f1b"] if per_rank > 1 and ranks <= layers else []
    chunks = f" × {per_rank} chunks on each" if per_rank > 1 else ""
    raise ConfigError(
        f"{ranks} ranks{chunks} are more stages than the {layers} layers of {points.layers}",
        key=KEY if per_rank == 1 else f"{KEY} · parallel.pp_plan.virtual_stages",
        way_out=f"Set {', or '.join(ways)}." if ways else f"Set {KEY} to 1.",
    )


def _given_borders(split_points: Sequence[str], points: CutPoints, layers: int, stages: int) -> tuple[int, ...]:
    if len(split_points) != stages - 1:
        raise ConfigError(
            f"{len(split_points)} split points make {len(split_points) + 1} stages, and the plan has {stages}",
            key=SPLIT_KEY,
            way_out=f"Name the first module of each further stage: {stages - 1} names, or leave it empty.",
        )
    places = {f"{points.layers}.{number}": number for number in range(layers)} | {points.behind[0]: layers}
    if unknown := [name for name in split_points if name not in places]:
        raise ConfigError(
            f"'{unknown[0]}' is not a module that a stage can begin with",
            key=SPLIT_KEY,
            way_out=f"Take {points.layers}.0 to {points.layers}.{layers - 1}, or {points.behind[0]} for a last stage "
            "without layers.",
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
    if empty := [stage for stage in range(plan.stages) if stage not in filled]:
        raise ConfigError(
            f"stage {empty[0]} has no parameters", key=SPLIT_KEY, way_out="Give it a layer, or use fewer ranks."
        )


def _is_in(name: str, module: str) -> bool:
    return bool(module) and (name == module or name.startswith(f"{module}."))


def _words(numbers: range) -> str:
    if not numbers:
        return "none"
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
