"""What a rank holds from step to step, counted exactly: parameters, optimizer state, moving average.

Nothing is built: the plan's own rules say which units there are and how each is cut (`fully_shard` cuts the first
dimension into as many equal parts as there are ranks; the first rank's part is the largest).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mindspeed_mm.core.patterns import is_inside, resolve_patterns
from mindspeed_mm.fsdp.distributed.expert.plan import cut_dim, expert_modules, is_spread, undivided
from mindspeed_mm.fsdp.distributed.pipeline.plan import StagePlan, plan_stages
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import build_precision_policy, plan_units
from mindspeed_mm.fsdp.distributed.tensor.plan import CUT_DIMS, TensorPlan, resolve_tensor_plan
from mindspeed_mm.fsdp.distributed.torch_parallelize import changes_nothing_on_one_rank
from mindspeed_mm.fsdp.models.structure.cut_points import find_cut_points
from mindspeed_mm.fsdp.models.structure.spec import ModelSpec
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes

FP32_BYTES = 4


@dataclass(frozen=True)
class Held:
    """One parameter as the first rank holds it."""

    name: str
    shape: tuple[int, ...]
    """After tensor and expert parallelism, before sharding."""
    numel: int
    """Elements of the shard, without padding."""
    padded_numel: int
    """Elements of the gathered parameter, padded to equal parts for all ranks."""
    dtype: torch.dtype
    is_trained: bool

    @property
    def bytes(self) -> int:
        """Of the shard."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class HeldUnit:
    """Parameters that are gathered together, or (`shards` 0) stay whole on every rank."""

    names: tuple[str, ...]
    """Of its modules."""
    parameters: tuple[Held, ...]
    shards: int


@dataclass(frozen=True)
class StaticPart:
    """Bytes of one rank that stay from step to step."""

    parameters: int
    trained: int
    """Of `parameters`, those that are trained."""
    optimizer: int
    average: int
    """The moving average of the weights."""
    gradients: int
    """Of the trained parameters, once a step's backward passes are done."""


def held_units(
    model: nn.Module,
    spec: ModelSpec,
    arguments: Arguments,
    sizes: ParallelSizes,
    stages: StagePlan | None = None,
    stage_rank: int = 0,
) -> list[HeldUnit]:
    """The units of a model and what one rank holds of each, children before the root.

    Args:
        model: Built, parameters on meta or real, not sharded; adapters are in it.
        spec: Of the model.
        arguments: The configuration.
        sizes: Of the groups.
        stages: Of a pipeline.
        stage_rank: Which of its ranks.
    """
    parallel, plan = arguments.parallel, arguments.parallel.fsdp_plan
    names = [name for name, _ in model.named_modules()]
    ignored = resolve_patterns(plan.ignored_modules, names, key="") if plan.ignored_modules else []
    wrapped = resolve_patterns(plan.apply_modules, names, key="") if plan.apply_modules else spec.shard_modules
    is_sharded = sizes.world > 1 or not changes_nothing_on_one_rank(plan)
    units = [unit.names for unit in plan_units(wrapped, spec.tie_groups, ignored)] if is_sharded else []
    experts = expert_modules(model, parallel.ep_plan) if is_spread(parallel) else []
    units = [(name,) for name in experts] + sorted(units, key=lambda unit: -max(name.count(".") for name in unit))
    cuts = _Cuts(model, parallel, sizes, experts)
    owned: set[int] = set()
    found: list[HeldUnit] = []
    for unit in [*((name,) for name in ignored), *units, ("",)]:
        shards = 0 if unit[0] in ignored or not is_sharded else sizes.efsdp if unit[0] in experts else sizes.fsdp
        own = []
        for module in unit:
            for name, parameter in model.get_submodule(module).named_parameters(prefix=module):
                if id(parameter) not in owned:
                    owned.add(id(parameter))
                    if stages is None or stages.rank_of(stages.owner(name)) == stage_rank:
                        own.append(cuts.held(name, parameter, shards))
        found.append(HeldUnit(tuple(unit), tuple(own), shards))
    return [unit for unit in found if unit.parameters]


class _Cuts:
    """How plans cut parameters."""

    def __init__(
        self, model: nn.Module, parallel: ParallelArguments, sizes: ParallelSizes, experts: Sequence[str]
    ) -> None:
        self._sizes, self._experts = sizes, experts
        self._tensor = tensor_plan_of(model, parallel)
        even = undivided(model, sizes.fsdp) if not experts else ()
        self._dims = {id(parameter): dim for _, parameter, dim in even if dim is not None}

    def held(self, name: str, parameter: nn.Parameter, shards: int) -> Held:
        """One parameter of a unit that is cut over `shards` ranks; 0: not at all."""
        shape, dim = list(parameter.shape) or [1], self._dims.get(id(parameter), 0)
        if is_inside(name, self._experts):
            dim = cut_dim(shape, self._sizes.ep, max(shards, 1)) or 0
            shape[0] //= self._sizes.ep
        module, _, last = name.rpartition(".")
        rule = self._tensor.rules.get(module) if self._tensor is not None else None
        if rule is not None and rule.style in CUT_DIMS and not rule.blocks:
            cut = CUT_DIMS[rule.style]
            if cut < len(shape) and (last != "bias" or cut == 0):
                shape[cut] = -(-shape[cut] // self._sizes.tp)
        rows, rest = shape[dim], math.prod(shape) // max(shape[dim], 1)
        part = -(-rows // max(shards, 1))
        trained = parameter.requires_grad
        return Held(name, tuple(shape), part * rest, part * max(shards, 1) * rest, parameter.dtype, trained)


def tensor_plan_of(model: nn.Module, parallel: ParallelArguments) -> TensorPlan | None:
    """How layers are split over ranks, if they are."""
    return resolve_tensor_plan(model, parallel.tp_plan) if parallel.tensor_parallel_size > 1 else None


def plan_of_stages(model: nn.Module, parallel: ParallelArguments) -> StagePlan | None:
    """How layers are cut into stages, if they are."""
    if parallel.pipeline_parallel_size == 1:
        return None
    return plan_stages(model, find_cut_points(model), parallel.pipeline_parallel_size, parallel.pp_plan)


def static_part(units: Collection[HeldUnit], state_bytes: Callable[[Held], int], *, averages: bool) -> StaticPart:
    """Bytes of what these units keep.

    Args:
        units: Of `held_units`.
        state_bytes: The optimizer's, of a trained parameter.
        averages: Whether a moving average of the weights is kept.
    """
    held = [parameter for unit in units for parameter in unit.parameters]
    trained = trained_of(units)
    return StaticPart(
        parameters=sum(parameter.bytes for parameter in held),
        trained=sum(parameter.bytes for parameter in trained),
        optimizer=sum(map(state_bytes, trained)),
        average=sum(p.numel * max(FP32_BYTES, p.dtype.itemsize) for p in trained) if averages else 0,
        gradients=sum(parameter.bytes for parameter in trained),
    )


def trained_of(units: Collection[HeldUnit]) -> list[Held]:
    """The trained parameters."""
    return [parameter for unit in units for parameter in unit.parameters if parameter.is_trained]


def precision(arguments: Arguments) -> tuple[torch.dtype | None, torch.dtype | None]:
    """What parameters are gathered in and gradients summed in; None: what they are."""
    policy = build_precision_policy(arguments.parallel.fsdp_plan, is_root=False)
    return policy.param_dtype, policy.reduce_dtype
