"""Applies the `features` section of a configuration to a model, in place.

The order is that of `fsdp/plan/resolve.py`: all steps stand before sharding, whose hooks stay outside of them, so that
modules are gathered once around all of their slices. No step renames a parameter, and none decides: what is done stands
in the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from mindspeed_mm.fsdp.features.feature_plan import FeaturePlan, resolve_features
from mindspeed_mm.fsdp.features.memory.activation_offload import offload_activations
from mindspeed_mm.fsdp.features.memory.chunk_mbs import run_in_slices
from mindspeed_mm.fsdp.features.memory.recompute import (
    AlikeRanks,
    DistributedInputs,
    apply_kept_results,
    recompute_modules,
)
from mindspeed_mm.fsdp.features.memory.weight_offload import offload_weights
from mindspeed_mm.fsdp.features.speed.compiled_blocks import compile_modules
from mindspeed_mm.fsdp.models.structure.stages import own_names, whole_of
from mindspeed_mm.fsdp.ops.forward_stack import ForwardKind
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments

__all__ = ["FeaturesApplier"]


class FeaturesApplier:
    """Applies features to a model; `applier(model)` takes its own steps in order.

    Args:
        features: The `features` section.
        blocks: Names of the model's repeated blocks, in execution order, for resolving the plan. Patterns in a
            feature's plan win over them.
        model_args: The `model` section, for its keys `skip_*_recompute`; as if it were empty when None.
        towers: Names of the towers in front of a language model, whose blocks have no rows.
        plan: What was resolved for the model; without one, the applier resolves it at its first step.
        tensor_ranks: Ranks of tensor parallelism, for a plan that divides inputs of recomputed modules among them.
    """

    def __init__(
        self,
        features: FeatureArguments,
        blocks: Sequence[str] = (),
        *,
        model_args: ModelArguments | None = None,
        towers: Collection[str] = (),
        plan: FeaturePlan | None = None,
        tensor_ranks: AlikeRanks | None = None,
    ) -> None:
        self._features = features
        self._blocks = tuple(blocks)
        self._model_args = model_args or ModelArguments()
        self._towers = tuple(towers)
        self._tensor_ranks = tensor_ranks
        self.plan = plan
        """What is done to the model; None before it is resolved."""

    def __call__(self, model: nn.Module) -> nn.Module:
        """All steps of this applier, for a model that is not sharded."""
        self.pre_fully_shard_apply(model)
        self.post_fully_shard_apply(model)
        return model

    def pre_fully_shard_apply(self, model: nn.Module) -> None:
        """Steps before sharding; each works on what those above it made.

        Raises:
            ConfigError: The features do not fit the model.
        """
        features = self._features
        if self.plan is None:
            self.plan = resolve_features(
                whole_of(model), features, self._blocks, model_args=self._model_args, towers=self._towers
            )
        plan = self.plan
        compiled = own_names(model, plan.compiled)
        if compiled and not plan.keeps_operations:
            # Innermost: what stands around a block is not traced.
            compile_modules(model, features.compile_plan, compiled, most=plan.most_compilations)
        if plan.waiting:
            offload_weights(model, own_names(model, plan.waiting))
        if plan.recomputed:
            self._recompute(model, plan)
        if compiled and plan.keeps_operations:
            # What is kept is asked of single operations, which a graph hides.
            kind = ForwardKind.COMPILE_RECOMPUTED
            compile_modules(model, features.compile_plan, compiled, kind, most=plan.most_compilations)
        if plan.offloaded:
            offload_activations(model, own_names(model, plan.offloaded))
        if plan.sliced:
            run_in_slices(model, own_names(model, plan.sliced), features.chunkmbs_plan)

    def post_fully_shard_apply(self, model: nn.Module) -> None:
        """Steps after sharding; no feature of this version has one."""

    def _recompute(self, model: nn.Module, plan: FeaturePlan) -> None:
        settings, names = self._features.recompute_plan, own_names(model, plan.recomputed)
        contexts = apply_kept_results(model, settings, self._model_args)
        whole = [name for name in names if name not in plan.distributed]
        recompute_modules(model, whole, use_reentrant=settings.use_reentrant, contexts=contexts)
        if plan.distributed:
            assert self._tensor_ranks is not None
            own, inputs = own_names(model, plan.distributed), DistributedInputs(self._tensor_ranks)
            recompute_modules(model, own, contexts=contexts, inputs=inputs)
