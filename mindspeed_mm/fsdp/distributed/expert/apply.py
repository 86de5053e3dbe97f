"""Applies expert parallelism to a model in place: expert parameters become DTensors cut on dim 0 over the axis `ep`,
and each expert module sends tokens to the ranks that hold their experts.

After tensor parallelism, before context parallelism, recompute and `fully_shard`; on meta or with values. No parameter
is renamed or reshaped: initialisation, loading, checkpoints and export see the full tensors. An expert's gradient is
the sum over the tokens of its `ep` group, which dispatch brings together, and over `efsdp` and `edp`, which sharding
sums: complete, and counted once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Unpack

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from mindspeed_mm.fsdp.distributed.expert.deepep import DeepEP, DeepEPBuffer
from mindspeed_mm.fsdp.distributed.expert.dispatch import (
    AllGather,
    AllToAll,
    BalancedAllToAll,
    ExpertRanks,
    PluginExpertForward,
)
from mindspeed_mm.fsdp.distributed.expert.plan import ExpertPlan, cut_dim, has_own_forward
from mindspeed_mm.fsdp.distributed.parallel_state import ParallelState
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import ShardOptions
from mindspeed_mm.fsdp.models.structure.stages import own_names
from mindspeed_mm.fsdp.ops.collectives import sharded_along
from mindspeed_mm.fsdp.ops.experts import ExpertsForward, own_experts_of, use_own_experts
from mindspeed_mm.fsdp.ops.forward_stack import ForwardKind, replace_forward
from mindspeed_mm.fsdp.ops.real_tokens import RealTokens
from mindspeed_mm.fsdp.params.parallel_args import EpPlan


def apply_expert_parallel(model: nn.Module, plan: ExpertPlan, ep_plan: EpPlan, state: ParallelState) -> None:
    """Spread the experts of a model. Every rank calls it.

    Args:
        model: Built, not recomputed, not sharded; whole, or what a rank of a pipeline has of it.
        plan: From `resolve_expert_plan`.
        ep_plan: The section, for modules with an `ep_forward` of their own.
        state: Its expert mesh.
    """
    ranks = ExpertRanks(state.axis_mesh("ep"))
    buffer = DeepEPBuffer(ranks)
    for name in own_names(model, plan.modules):
        module = model.get_submodule(name)
        _cut_experts(module, ranks)
        if has_own_forward(module):
            replace_forward(module, ForwardKind.EXPERT, own_forward(module, ranks, ep_plan))
        else:
            use_own_experts(module, _dispatcher(plan, ranks, buffer, own_experts_of(module).real_tokens))


def shard_experts(root: nn.Module, names: Iterable[str], state: ParallelState, **options: Unpack[ShardOptions]) -> None:
    """Wrap each expert module on the expert mesh; call it before the blocks around them are wrapped.

    Args:
        root: The model after `apply_expert_parallel`, or a stage of it.
        names: Of the expert modules below it.
        state: Its expert mesh.
        options: Of `fully_shard`: precision, resharding, offload.
    """
    mesh = state.axis_mesh("efsdp")
    if state.axis_size("edp") > 1:
        # Copies over `edp`, each of which is cut over `efsdp`.
        mesh = state.expert_mesh["edp", "efsdp"]
    sizes = state.sizes

    def placement(parameter: nn.Parameter) -> Shard:
        dim = cut_dim(parameter.shape, sizes.ep, sizes.efsdp)
        assert dim is not None, "checked by resolve_expert_plan"
        return Shard(dim)

    for name in names:
        fully_shard(root.get_submodule(name), mesh=mesh, shard_placement_fn=placement, **options)


def own_forward(module: Any, ranks: ExpertRanks, plan: EpPlan) -> PluginExpertForward:
    """A module's `ep_forward` with what it asks for: the group, and the section `parallel.ep_plan`."""
    given = {"ep_group": ranks.group, "ep_plan": plan}
    leading: list[object] = []
    by_name: dict[str, object] = {}
    is_leading = True
    for name in inspect.signature(module.ep_forward).parameters:
        is_leading = is_leading and name in given
        if is_leading:
            leading.append(given[name])
        elif name in given:
            by_name[name] = given[name]
    return PluginExpertForward(module.ep_forward, tuple(leading), by_name)


def _dispatcher(
    plan: ExpertPlan, ranks: ExpertRanks, buffer: DeepEPBuffer, real_tokens: RealTokens | None
) -> ExpertsForward:
    if plan.dispatcher == "deepep":
        return DeepEP(ranks, buffer, real_tokens)
    if plan.dispatcher == "allgather":
        return AllGather(ranks, real_tokens)
    if plan.copies:
        return BalancedAllToAll(ranks, plan.copies, real_tokens)
    return AllToAll(ranks, real_tokens)


def _cut_experts(module: nn.Module, ranks: ExpertRanks) -> None:
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[name] = sharded_along(parameter, 0, ranks)
