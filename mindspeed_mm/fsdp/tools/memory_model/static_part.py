"""What a rank holds from step to step, counted exactly: parameters, optimizer state, moving average; and what the
optimizer takes for the length of its own step.

Nothing is built and nothing decided: the plan says which units there are and how each is cut (`fully_shard` cuts the
first dimension into as many equal parts as there are ranks; the first rank's part is the largest).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mindspeed_mm.core.patterns import is_inside
from mindspeed_mm.fsdp.distributed.expert.plan import cut_dim
from mindspeed_mm.fsdp.distributed.parallel_plan import ParallelPlan
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import innermost_first
from mindspeed_mm.fsdp.distributed.tensor.plan import CUT_DIMS, SplitRule, Style
from mindspeed_mm.fsdp.optimizer.offload import MOST_BYTES
from mindspeed_mm.fsdp.params.training_args import OPTIMIZERS, TrainingArguments

FP32_BYTES = 4


@dataclass(frozen=True)
class HeldParameter:
    """One parameter as the first rank holds it."""

    name: str
    shape: tuple[int, ...]
    """After tensor and expert parallelism, before sharding."""
    computed: tuple[int, ...]
    """What the rank's forward pass works with, of all experts."""
    numel: int
    """Elements of the shard, without padding."""
    padded_numel: int
    """Elements of the gathered parameter, padded to equal parts for all ranks."""
    dtype: torch.dtype
    is_trained: bool

    @property
    def bytes(self) -> int:
        """Bytes that the shard takes, without padding."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class HeldUnit:
    """Parameters that are gathered together, or (`shards` 0) stay whole on every rank."""

    names: tuple[str, ...]
    """Of its modules."""
    parameters: tuple[HeldParameter, ...]
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


def held_units(model: nn.Module, plan: ParallelPlan, stage_rank: int = 0) -> list[HeldUnit]:
    """The units of a model and what one rank holds of each, children before the root.

    Args:
        model: Whole, parameters on meta or real; adapters are in it.
        plan: Resolved for it.
        stage_rank: Which rank of a pipeline, where there is one.
    """
    sharding, sizes, stages = plan.sharding, plan.sizes, plan.stages
    cuts = _Cuts(plan)
    owned: set[int] = set()
    found: list[HeldUnit] = []

    def take(names: Sequence[str], shards: int) -> None:
        own = []
        for module in names:
            for name, parameter in model.get_submodule(module).named_parameters(prefix=module):
                if id(parameter) not in owned:
                    owned.add(id(parameter))
                    if stages is None or stages.rank_of(stages.owner(name)) == stage_rank:
                        own.append(cuts.held(name, parameter, shards))
        if own:
            found.append(HeldUnit(tuple(names), tuple(own), shards))

    if sharding.on_host:
        whole = []
        for name in sharding.on_host:
            parameter = model.get_parameter(name)
            owned.add(id(parameter))
            whole.append(cuts.held(name, parameter, 0))
        found.append(HeldUnit(sharding.on_host, tuple(whole), 0))
    for name in sharding.ignored:
        take((name,), 0)
    for name in sharding.experts:
        take((name,), sizes.efsdp)
    for unit in innermost_first(sharding.units):
        take(unit.names, sizes.fsdp * sizes.tp if unit.of_tower else sizes.fsdp)
    take(("",), sizes.fsdp if sharding.is_sharded else 0)
    return found


class _Cuts:
    """How a plan cuts parameters."""

    def __init__(self, plan: ParallelPlan) -> None:
        self._sizes, self._sharding = plan.sizes, plan.sharding
        self._rules: Mapping[str, SplitRule] = {}
        if plan.tensor is not None:
            self._rules = plan.tensor.cuts

    def held(self, name: str, parameter: nn.Parameter, shards: int) -> HeldParameter:
        """One parameter of a unit that is cut over `shards` ranks; 0: not at all."""
        computed = self._computed(name, tuple(parameter.shape) or (1,))
        module = name.rpartition(".")[0]
        rule = self._rules.get(module)
        # What is fused of several stays whole in memory: each rank computes with its part of every block.
        is_cut = rule is not None and rule.style in CUT_DIMS and not rule.blocks
        shape = list(computed if is_cut else parameter.shape) or [1]
        dim = self._sharding.cut_dims.get(name, 0)
        if is_inside(name, self._sharding.experts):
            dim = cut_dim(shape, self._sizes.ep, max(shards, 1)) or 0
            shape[0] //= self._sizes.ep
        rows, rest = shape[dim], math.prod(shape) // max(shape[dim], 1)
        part = -(-rows // max(shards, 1))
        whole = part * max(shards, 1) * rest
        return HeldParameter(name, tuple(shape), computed, part * rest, whole, parameter.dtype, parameter.requires_grad)

    def _computed(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What a tensor-parallel rank computes with."""
        module, _, last = name.rpartition(".")
        rule = self._rules.get(module)
        if rule is None:
            return shape
        dim = _COMPUTED_DIMS.get(rule.style)
        if dim is None or dim >= len(shape) or (last == "bias" and dim > 0):
            return shape
        return (*shape[:dim], -(-shape[dim] // self._sizes.tp), *shape[dim + 1 :])


_COMPUTED_DIMS = CUT_DIMS | {Style.WIDE_NORM: 0, Style.HEAD_NUMBERS: 0}
"""The dimension of which a rank uses a part, whether it holds the rest or not."""


def static_part(
    units: Collection[HeldUnit], state_bytes: Callable[[HeldParameter], int], *, averages: bool
) -> StaticPart:
    """Bytes of what these units keep.

    Args:
        units: Of `held_units`.
        state_bytes: The optimizer's, of a trained parameter.
        averages: Whether a moving average of the weights is kept.
    """
    parameters = average = 0
    for unit in units:
        parameters += sum(parameter.bytes for parameter in unit.parameters)
    trained = trained_of(units)
    if averages:
        average = sum(parameter.numel * max(FP32_BYTES, parameter.dtype.itemsize) for parameter in trained)
    trained_bytes = sum(parameter.bytes for parameter in trained)
    return StaticPart(
        parameters=parameters,
        trained=trained_bytes,
        optimizer=sum(map(state_bytes, trained)),
        average=average,
        gradients=trained_bytes,
    )


def trained_of(units: Collection[HeldUnit]) -> list[HeldParameter]:
    """Return the trained parameters of all units, unit by unit."""
    trained: list[HeldParameter] = []
    for unit in units:
        trained += [parameter for parameter in unit.parameters if parameter.is_trained]
    return trained


# --- the optimizer ----------------------------------------------------------------------------------------------------


_INT8_BLOCK = 256
"""Numbers that share a scale."""
_INT8_LEAST = 4096
"""Smaller parameters keep fp32 moments."""


def state_bytes(parameter: HeldParameter, training: TrainingArguments, matrices: Collection[str]) -> int:
    """The optimizer's state of a parameter, on whichever side it lies.

    Args:
        parameter: A trained one.
        training: The section.
        matrices: Names of the parameters that an optimizer for matrices takes; the rest is AdamW's.
    """
    facts = OPTIMIZERS[training.optimizer]
    is_adamws = facts.for_matrices and parameter.name not in matrices
    moments = OPTIMIZERS["adamw"].moments if is_adamws else facts.moments
    if training.optimizer_state_dtype == "bf16":
        return moments * parameter.numel * 2
    if training.optimizer_state_dtype == "int8" and parameter.numel >= _INT8_LEAST:
        return moments * (parameter.numel + -(-parameter.numel // _INT8_BLOCK) * FP32_BYTES)
    return moments * parameter.bytes


def step_bytes(trained: Iterable[HeldParameter], training: TrainingArguments, device_type: str) -> int:
    """What the optimizer's step takes on the device for itself, all of it freed again."""
    held = list(trained)
    numel = sum(parameter.numel for parameter in held)
    if training.optimizer_state_dtype:  # a bucket at a time is unpacked: two moments in fp32
        a_number = 16 if training.optimizer_state_dtype == "bf16" else 48
        return min(numel, MOST_BYTES // a_number) * 2 * FP32_BYTES
    if OPTIMIZERS[training.optimizer].moments_on_host:  # two buckets at a time are on the device
        return min(2 * MOST_BYTES, 2 * numel * FP32_BYTES)
    if training.optimizer == "lion":  # the direction of a parameter at a time
        return max((parameter.bytes for parameter in held), default=0)
    if training.optimizer == "adamw" and not training.adam_fused and device_type != "cpu":
        return sum(parameter.bytes for parameter in held)  # multi-tensor kernels: the root of all second moments
    return 0
