"""Applies a parallel plan to a model, in place.

The order is that of `fsdp/plan/resolve.py`: pipeline split → tensor → expert → context, then sharding (units, then the
root), then prefetch order. No step renames a parameter, and none decides: what is done stands in the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.distributed.context.apply import ContextParallel, apply_context_parallel
from mindspeed_mm.fsdp.distributed.expert.apply import apply_expert_parallel, shard_experts
from mindspeed_mm.fsdp.distributed.parallel_plan import ModelLayout, ParallelPlan, resolve_parallel_plan
from mindspeed_mm.fsdp.distributed.parallel_state import ParallelState, get_parallel_state
from mindspeed_mm.fsdp.distributed.pipeline.apply import Pipeline
from mindspeed_mm.fsdp.distributed.pipeline.stage import StageModule
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import (
    Unit,
    build_expert_options,
    own_sharding,
    replicate_modules,
    set_gradient_sync,
    set_prefetch,
    settle_sharded,
    shard_units,
    sum_gradients,
)
from mindspeed_mm.fsdp.distributed.sharding.plan import ShardingPlan
from mindspeed_mm.fsdp.distributed.tensor.apply import apply_tensor_parallel
from mindspeed_mm.fsdp.distributed.towers.groups import build_tower_mesh
from mindspeed_mm.fsdp.distributed.towers.media import MediaSharing, share_media
from mindspeed_mm.fsdp.models.structure.stages import whole_of
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

__all__ = ["ParallelApplier", "set_gradient_sync"]


class ParallelApplier:
    """Applies a parallel plan to a model; `applier(model)` takes its own steps in order.

    Args:
        parallel_args: The `parallel` section.
        plan: What was resolved for the model; without one, the applier resolves it at its first step.
        shard_modules: The model's own list of modules to wrap one by one, in execution order, for resolving the plan.
            Patterns in `fsdp_plan.apply_modules` win over it.
        tie_groups: Names of modules that share a parameter, for resolving the plan.
        towers: Names of towers, whose patches context parallelism spreads as well, for resolving the plan.
        gather_logits: Under tensor parallelism, let the output head return the whole vocabulary on every rank.
        expert_copies: Under expert parallelism, copies of busy experts that a rank may hold.
        pipeline: Of `split_into_stages`, when the model is this rank's part of a pipeline: its stages are sharded.
    """

    def __init__(
        self,
        parallel_args: ParallelArguments,
        *,
        plan: ParallelPlan | None = None,
        shard_modules: Sequence[str] = (),
        tie_groups: Sequence[Sequence[str]] = (),
        towers: Collection[str] = (),
        gather_logits: bool = False,
        expert_copies: int = 0,
        pipeline: Pipeline | None = None,
    ) -> None:
        self._parallel = parallel_args
        self._layout = ModelLayout(
            shard_modules, tie_groups, towers, gathers_logits=gather_logits, expert_copies=expert_copies
        )
        self.plan = plan
        """What is done to the model; None before it is resolved."""
        self.context: ContextParallel | None = None
        """What the training step must know of sequences spread over ranks, if they are."""
        self.media: MediaSharing | None = None
        """Towers that encode the media of other ranks, if they do."""
        self._pipeline = pipeline
        self._sharded: list[tuple[nn.Module, list[Unit]]] = []
        self._model_shards_itself = False

    def __call__(self, model: nn.Module) -> nn.Module:
        """All steps of this applier. The parallel state exists; parameters are on meta or real."""
        self.pre_fully_shard_apply(model)
        self.fully_shard_apply(model)
        self.post_fully_shard_apply(model)
        return model

    def pre_fully_shard_apply(self, model: nn.Module) -> None:
        """Steps before sharding, each on one-device modules: tensor, expert, then context parallelism, then towers
        that are laid out otherwise.

        Raises:
            ConfigError: The plan does not fit the model.
        """
        if (stages := self._parallel.pipeline_parallel_size) > 1 and self._pipeline is None:
            raise ConfigError(
                f"{stages}, and the model was not split into stages before",
                key="parallel.pipeline_parallel_size",
                way_out="Train with the trainer, or call split_into_stages first.",
            )
        state = get_parallel_state()
        plan = self._resolved(model)
        if plan.tensor is not None:
            mesh = state.axis_mesh("tp")
            apply_tensor_parallel(model, plan.tensor, mesh, gather_logits=plan.gathers_logits)
        if plan.experts is not None:
            apply_expert_parallel(model, plan.experts, plan.section.ep_plan, state)
        if plan.context is not None:
            self.context = apply_context_parallel(model, plan.context, state)
        if plan.towers is not None:
            self.media = share_media(model, plan.towers.towers, plan.towers.sizes, state)

    def fully_shard_apply(self, model: nn.Module) -> None:
        """Shard parameters, gradients and optimizer state; gradients are summed.

        A model's own `fully_shard(fsdp_plan) -> bool` is asked first (`own_sharding`); True means that it has done the
        work.
        """
        plan = self._resolved(model)
        sharding = plan.sharding
        own_hook = own_sharding(model)
        self._model_shards_itself = own_hook is not None and own_hook(sharding.section)
        roots: Sequence[nn.Module] = [model]
        if self._pipeline is not None:
            roots = self._pipeline.stages
        for root in roots:
            if self._model_shards_itself:
                settle_sharded(root, sharding.section)
            elif sharding.is_sharded:
                self._shard(root, plan, get_parallel_state())
            sum_gradients(root)

    def post_fully_shard_apply(self, model: nn.Module) -> None:
        """Set the order of prefetching.

        A model's own `set_modules_to_prefetch(fsdp_plan, ep_plan) -> bool` is asked first.
        """
        sharding = self._resolved(model).sharding
        own_hook = attribute_at(model, "set_modules_to_prefetch")
        if own_hook is not None and own_hook(sharding.section, self._parallel.ep_plan):
            return
        for root, units in self._sharded:
            hooked = _names_in(root, sharding.hooked)
            set_prefetch(root, units, *sharding.prefetch, hooked)

    def _resolved(self, model: nn.Module) -> ParallelPlan:
        if self.plan is None:
            whole = whole_of(model)
            self.plan = resolve_parallel_plan(whole, self._parallel, get_parallel_state().sizes, self._layout)
        return self.plan

    def _shard(self, root: nn.Module, plan: ParallelPlan, state: ParallelState) -> None:
        """Shard `root`: the model, or a stage, which holds some of the model's modules."""
        sharding, experts = plan.sharding, plan.experts
        mesh = state.axis_mesh("fsdp")
        if state.axis_size("dp_replicate") > 1:
            mesh = state.get_hsdp_device_mesh()
        tower_mesh = None
        if sharding.whole_towers:
            tower_mesh = build_tower_mesh(state.sizes, state.device_type)
        copies = _names_in(root, sharding.copies)
        if copies:
            replicate_modules(map(root.get_submodule, copies), state.build_copies_device_mesh(), sharding.section)
        units = []
        for unit in sharding.units:
            names = _names_in(root, unit.names)
            if names:
                units.append(replace(unit, names=tuple(names)))
        ignored: set[nn.Parameter] = set()
        for name in _names_in(root, sharding.ignored):
            ignored.update(root.get_submodule(name).parameters())
        on_host = set(sharding.on_host)
        for name, parameter in root.named_parameters():
            if name in on_host:
                ignored.add(parameter)
        if experts is not None:
            shard_experts(root, _names_in(root, experts.modules), state, **build_expert_options(sharding.section))
        shard_units(root, units, sharding.section, mesh, ignored, _cut_dims(root, sharding), tower_mesh)
        self._sharded.append((root, units))


def _cut_dims(root: nn.Module, sharding: ShardingPlan) -> dict[nn.Parameter, int]:
    found = {}
    for name, dim in sharding.cut_dims.items():
        module, _, last = name.rpartition(".")
        for own in _names_in(root, [module]):
            found[root.get_submodule(own).get_parameter(last)] = dim
    return found


def _names_in(root: nn.Module, names: Sequence[str]) -> list[str]:
    """Names of a model's modules as they are below `root`: all of them below the model itself, below a stage those
    that it holds."""
    if isinstance(root, StageModule):
        return root.names_of(names)
    return list(names)
