"""Sharding of parameters, gradients and optimizer state with torch's `fully_shard` (FSDP2), or by a hook of the model's
own.

One mechanism serves every plan: ZeRO-3, ZeRO-2, hybrid sharding, replication (hybrid sharding with shards of one rank)
and a single process. Gradients are *summed* over ranks: the loss carries the divisor.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypedDict
from weakref import WeakSet

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.patterns import is_inside
from mindspeed_mm.fsdp.distributed.sharding.visible_outputs import RootOutput, check_outputs
from mindspeed_mm.fsdp.params.parallel_args import FsdpPlan
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, has_all

_keeps_parameters: WeakSet[FSDPModule] = WeakSet()
"""Units that stay whole for the length of a pass: cutting them between micro-batches saves no memory at the peak."""


class ShardOptions(TypedDict, total=False):
    """Arguments of `fully_shard` that are used here."""

    mesh: DeviceMesh
    reshard_after_forward: bool | int | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: set[nn.Parameter]
    shard_placement_fn: Callable[[nn.Parameter], Shard | None]


@dataclass(frozen=True)
class Unit:
    """Modules gathered and reduced together. More than one: they share a parameter."""

    names: tuple[str, ...]
    of_tower: bool = False
    """Whether it is cut over the mesh of whole towers instead of the model's."""

    @property
    def depth(self) -> int:
        """Levels below the root, of the deepest module."""
        return max(name.count(".") for name in self.names)

    @property
    def stack(self) -> str:
        """Parent of the first module: units of one parent run one after the other, or not at all."""
        return self.names[0].rpartition(".")[0]


def plan_units(
    shard_modules: Sequence[str], tie_groups: Sequence[Sequence[str]], ignored: Sequence[str] = ()
) -> list[Unit]:
    """Which modules are wrapped below the root, in execution order. Pure.

    Args:
        shard_modules: Modules wrapped one by one, in execution order.
        tie_groups: Modules that share a parameter; each group becomes one unit, whether listed above or not.
        ignored: Modules that are not sharded, with everything below them.
    """
    tied = set(chain.from_iterable(tie_groups))
    alone = [(name,) for name in shard_modules if name not in tied]
    units = []
    for names in (*map(tuple, tie_groups), *alone):
        if not any(is_inside(name, ignored) for name in names):
            units.append(Unit(names))
    return units


def names_of_units(units: Sequence[Unit]) -> list[str]:
    """Names of all modules that are wrapped."""
    return list(chain.from_iterable(unit.names for unit in units))


def innermost_first(units: Sequence[Unit]) -> list[Unit]:
    """The order of wrapping: a parameter belongs to the first unit that holds it."""
    return sorted(units, key=lambda unit: -unit.depth)


def shard_units(
    model: nn.Module,
    units: Sequence[Unit],
    plan: FsdpPlan,
    mesh: DeviceMesh,
    ignored_params: set[nn.Parameter],
    cut_dims: Mapping[nn.Parameter, int] | None = None,
    tower_mesh: DeviceMesh | None = None,
) -> None:
    """Wrap every unit, the innermost first, and then the root.

    Args:
        model: Built, parameters on meta or real; tied parameters tied.
        units: From `plan_units`.
        plan: Precision, resharding and offload.
        mesh: One axis (shards), or two (copies, shards).
        ignored_params: Parameters that stay plain tensors.
        cut_dims: Parameters that are cut along another dimension than the first.
        tower_mesh: Of units that are marked `of_tower`.
    """
    output = RootOutput(model)
    options = unit_options(plan, mesh)
    options["ignored_params"] = ignored_params
    if cut_dims:
        options["shard_placement_fn"] = partial(_placement_of, cut_dims)
    check_outputs((name, model.get_submodule(name)) for name in names_of_units(units))
    for unit in innermost_first(units):
        modules = [model.get_submodule(name) for name in unit.names]
        own = options.copy()
        if unit.of_tower and tower_mesh is not None:
            own["mesh"] = tower_mesh
        if len(modules) > 1:
            # A tied head needs its weight again at once in backward, and the embedding holds the group open anyway.
            own["reshard_after_forward"] = False
            fully_shard(modules, **own)
        else:
            fully_shard(modules[0], **own)
    fully_shard(model, **root_options(options, plan))
    output.give_back()
    settle_sharded(model, plan, units)


def unit_options(plan: FsdpPlan, mesh: DeviceMesh) -> ShardOptions:
    """Arguments of `fully_shard` for a unit below the root."""
    return {
        "mesh": mesh,
        "reshard_after_forward": plan.reshard_after_forward,
        "mp_policy": build_precision_policy(plan),
        "offload_policy": build_offload_policy(plan),
    }


def root_options(options: ShardOptions, plan: FsdpPlan) -> ShardOptions:
    """Arguments of `fully_shard` for the root, where `options` are those of units."""
    own = options.copy()
    own["mp_policy"] = replace(options["mp_policy"], output_dtype=torch_dtype(plan.output_dtype))
    if options["reshard_after_forward"] is True:
        own["reshard_after_forward"] = None  # torch's choice for a root: its parameters stay, as backward begins there
    return own


def settle_sharded(model: nn.Module, plan: FsdpPlan, units: Sequence[Unit] = ()) -> None:
    """What a sharded model needs afterwards, whether `shard_units` or its own `fully_shard` wrapped it.

    Args:
        model: Its root is wrapped.
        plan: The section that it was wrapped by.
        units: Where `shard_units` wrapped it.
    """
    _keeps_parameters.update(_kept_whole(model, units, plan))
    _expect_logits_to_be_a_view(model)
    _keep_recording(model)
    _tolerate_unused(model)


def _tolerate_unused(model: nn.Module) -> None:
    """Let passes that do not communicate leave out units that no pass has run yet, such as a tower before the first
    picture: torch (2.11 to 2.13) raises there, where a pass that communicates leaves them out."""

    def converted(parameter: object, plain: Callable[[], None]) -> None:
        if has_all(parameter, "_unsharded_param"):
            plain()

    for group in chain.from_iterable(map(_groups_of, fsdp_modules(model))):
        for parameter in group.fsdp_params:
            plain = parameter.to_accumulated_grad_if_needed
            parameter.to_accumulated_grad_if_needed = partial(converted, parameter, plain)


def _keep_recording(model: nn.Module) -> None:
    """transformers looks up what a model's layers are asked for (of some towers every layer's output) by its class's
    name, which wrapping has changed."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    for module in fsdp_modules(model):
        if isinstance(module, library.PreTrainedModel):
            # The dict's own way, which takes names in all releases.
            dict.__setitem__(library._CAN_RECORD_REGISTRY, str(type(module)), module._can_record_outputs)


def _kept_whole(model: nn.Module, units: Sequence[Unit], plan: FsdpPlan) -> list[FSDPModule]:
    """What is not cut between the forward and the backward pass, by the choices made above."""
    if plan.reshard_after_forward is False:
        return fsdp_modules(model)
    names = [""] if plan.reshard_after_forward is True else []
    for unit in units:
        if len(unit.names) > 1:
            names += unit.names
    return [module for module in map(model.get_submodule, names) if isinstance(module, FSDPModule)]


def _placement_of(cut_dims: Mapping[nn.Parameter, int], parameter: nn.Parameter) -> Shard | None:
    if parameter in cut_dims:
        return Shard(cut_dims[parameter])
    return None


def _expect_logits_to_be_a_view(model: nn.Module) -> None:
    """Silence torch's warning that a wrapped module returned a view, for the head and the root: a linear layer on
    (B, L, H) always does, and nothing writes into logits. For blocks it stays: there it can mean lost gradients."""
    names = f"{re.escape(type(model).__name__)}|.*FSDPLinear"
    warnings.filterwarnings(
        "ignore", message=rf"FSDP2-wrapped module \(({names})\) returned a view", category=UserWarning
    )


def expect_views() -> None:
    """Silence the same warning for every module: diffusers' blocks cut text and image out of one tensor, and nothing
    writes into either (gradients under sharding are tested)."""
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view", category=UserWarning)


def replicate_modules(modules: Iterable[nn.Module], mesh: DeviceMesh, plan: FsdpPlan) -> None:
    """Keep modules whole on every rank, computed in the plan's precision as all others, with their gradients summed.

    Args:
        modules: Modules whose trainable parameters no plan shards.
        mesh: (copies, 1), from `ParallelState.build_copies_device_mesh`.
        plan: Its precision is read.
    """
    policy = build_precision_policy(plan)
    for module in modules:
        frozen = {p for p in module.parameters() if not p.requires_grad}
        fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=frozen, mp_policy=policy)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Every wrapped module of a model, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def sum_gradients(model: nn.Module) -> None:
    """Make every wrapped module add gradients up over ranks, experts included.

    A divide factor alone asks for a collective that gloo lacks; with forced sums the factor is applied apart, and 1
    means no division.
    """
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward pass communicates gradients, or leaves them on this rank for a later one to sum.

    Parameters that a pass keeps whole anyway (all of them with ZeRO-2, else tied ends and the root's own) stay gathered
    until the pass that communicates.
    """
    for module in fsdp_modules(model):
        module.set_requires_gradient_sync(enabled, recurse=False)
        if module in _keeps_parameters:
            module.set_reshard_after_backward(enabled, recurse=False)


def set_prefetch(
    model: nn.Module, units: Sequence[Unit], forward: int, backward: int, hooked: Collection[str] = ()
) -> None:
    """Gather `forward` units ahead in the forward pass and `backward` units ahead in the backward pass.

    Only along one stack of blocks. Across stacks it would gather the first block of a tower that a step may not run;
    that copy would be used in a later step, after the weights have changed.

    Args:
        model: Sharded.
        units: In execution order.
        forward: Depth in the forward pass.
        backward: Depth in the backward pass.
        hooked: Units whose inner wrapped modules (experts) are gathered whenever they are: at once with them, and ahead
            with them. Without it, inner modules are gathered when their own turn comes, and everything waits.
    """
    for stack in _stacks(units).values():
        groups = [_gathered_together(model, unit, hooked) for unit in stack]
        # In the backward pass both the blocks and the modules inside each come in the opposite order.
        backwards = [[block, *reversed(inner)] for block, *inner in reversed(groups)]
        for position, (block, *inner) in enumerate(groups):
            ahead = [*inner, *chain.from_iterable(groups[position + 1 : position + 1 + forward])]
            if ahead:
                block.set_modules_to_forward_prefetch(ahead)
        for position, (block, *inner) in enumerate(backwards):
            ahead = [*inner, *chain.from_iterable(backwards[position + 1 : position + 1 + backward])]
            if ahead:
                block.set_modules_to_backward_prefetch(ahead)


def _gathered_together(model: nn.Module, unit: Unit, hooked: Collection[str]) -> list[FSDPModule]:
    """A unit's module, and behind it the wrapped ones inside that are gathered whenever it is, in its order."""
    block = model.get_submodule(unit.names[0])
    assert isinstance(block, FSDPModule), unit.names
    if unit.names[0] in hooked:
        return fsdp_modules(block)
    return [block]


@contextmanager
def gathered_before(model: nn.Module) -> Iterator[None]:
    """Begin to gather every unit now, in the order of the model; what the step did not run, a tower without media, is
    let go of at the end."""
    modules = fsdp_modules(model)
    handles = [module.unshard(async_op=True) for module in modules]
    yield
    for module, handle in zip(modules, handles, strict=True):
        if handle is not None:
            handle.wait()
        module.reshard()


@contextmanager
def resident(model: nn.Module) -> Iterator[None]:
    """Inside, every unit is whole and stays so: for many forward passes in a row, as when tokens are drawn one after
    the other. Each unit is gathered once, and ranks need not make equally many passes. No gradients."""
    modules = fsdp_modules(model)
    if modules:
        modules[0]._get_fsdp_state()._lazy_init()  # units that are gathered before the root knows them refuse it later
    kept = []
    for group in chain.from_iterable(map(_groups_of, modules)):
        kept.append((group, group.post_forward_mesh_info))
        group.post_forward_mesh_info = None  # to a group without it, a forward pass leaves its parameters whole
    handles = [module.unshard(async_op=True) for module in modules]
    for handle in handles:
        if handle is not None:
            handle.wait()
    try:
        yield
    finally:
        for group, before in kept:
            group.post_forward_mesh_info = before
            # Each pass is noted for a backward pass, which clears the notes; thousands of tokens have none.
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()
        for module in modules:
            module.reshard()


def _groups_of(module: FSDPModule) -> list[Any]:
    """The parameter groups of a unit; torch 2.11 has one at most."""
    state: Any = module._get_fsdp_state()
    if has_all(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    if group is None:
        return []
    return [group]


def build_precision_policy(plan: FsdpPlan) -> MixedPrecisionPolicy:
    """Precision of a unit: gradients are summed in fp32 when parameters compute in less. The output dtype is the
    root's alone (`root_options`), since a block that returned another dtype than it takes would break the next one."""
    reduce_dtype = plan.reduce_dtype
    if reduce_dtype is None and plan.param_dtype is not None:
        reduce_dtype = "fp64" if plan.param_dtype == "fp64" else "fp32"
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(plan.param_dtype),
        reduce_dtype=torch_dtype(reduce_dtype),
        cast_forward_inputs=plan.cast_forward_inputs,
    )


def build_expert_options(plan: FsdpPlan) -> ShardOptions:
    """Arguments of `fully_shard` for expert modules, which lie inside the blocks: their inputs come in the right types,
    and the router's weights may be wider than the rest."""
    precision = replace(build_precision_policy(plan), cast_forward_inputs=False)
    return {
        "reshard_after_forward": plan.reshard_after_forward is not False,
        "mp_policy": precision,
        "offload_policy": build_offload_policy(plan),
    }


def build_offload_policy(plan: FsdpPlan) -> OffloadPolicy:
    """Host offload, with pinned memory only where there is an accelerator to copy to."""
    if not plan.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=plan.pin_memory is not False and get_device_type() != "cpu")


def check_reshard(reshard_after_forward: bool | int, shards: int) -> None:
    """Raise `ConfigError` when parameters cannot be cut again over groups of that many ranks."""
    if isinstance(reshard_after_forward, bool) or shards % reshard_after_forward == 0:
        return
    raise ConfigError(
        f"groups of {reshard_after_forward} do not divide the {shards} ranks of a sharding group",
        key="parallel.fsdp_plan.reshard_after_forward",
        way_out="Choose a divisor, or true (ZeRO-3) or false (ZeRO-2).",
    )


def check_dtypes(names: Sequence[str], parameters: Iterable[nn.Parameter]) -> None:
    """Raise `ConfigError` when trainable parameters of one unit, which are reduced together, differ in dtype."""
    dtypes = {parameter.dtype for parameter in parameters if parameter.requires_grad}
    if len(dtypes) > 1:
        told = " and ".join(sorted(map(str, dtypes))).replace("torch.", "")
        raise ConfigError(
            f"{' and '.join(names)} holds trainable parameters of {told}",
            key="parallel.fsdp_plan.apply_modules",
            way_out="Keep trainable parameters in one dtype (fp32 masters), or wrap the odd module on its own.",
        )


def _stacks(units: Sequence[Unit]) -> Mapping[str, list[Unit]]:
    stacks: dict[str, list[Unit]] = {}
    for unit in units:
        if len(unit.names) == 1:
            stacks.setdefault(unit.stack, []).append(unit)
    return stacks


def own_sharding(model: nn.Module) -> Callable[[FsdpPlan], bool] | None:
    """A model's `fully_shard(fsdp_plan)`, which returns whether it has done the work; None where it has none.

    A base class may bring the hook for those of its models that need one: it then has `shards_itself()`, too, which is
    False for the others.
    """
    decides = attribute_at(model, "shards_itself")
    if decides is not None and not decides():
        return None
    return attribute_at(model, "fully_shard")
