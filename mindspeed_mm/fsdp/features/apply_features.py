"""Applies the `features` section of a configuration to a model, in place.

The order is that of `fsdp/train/assemble.py`: all steps stand before sharding, whose hooks stay outside of them, so
that modules are gathered once around all of their slices. No step renames a parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.features.memory.activation_offload import offload_activations
from mindspeed_mm.fsdp.features.memory.chunk_mbs import check_slices, run_in_slices
from mindspeed_mm.fsdp.features.memory.recompute import recompute_modules
from mindspeed_mm.fsdp.features.memory.selection import select_modules
from mindspeed_mm.fsdp.features.memory.skipped_kernels import apply_kept_results, check_skipped_kernels
from mindspeed_mm.fsdp.features.speed.compiled_blocks import check_compile, compile_blocks
from mindspeed_mm.fsdp.models.structure.share import own_names, whole_of
from mindspeed_mm.fsdp.ops.forward_stack import ForwardKind
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments

__all__ = ["FeaturesApplier"]

RECOMPUTE_MODULES = "features.recompute_plan.apply_modules"
OFFLOAD_MODULES = "features.activation_offload_plan.apply_modules"
SLICED_MODULES = "features.chunkmbs_plan.apply_modules"


class FeaturesApplier:
    """Applies features to a model; `applier(model)` takes its own steps in order.

    Args:
        features: The `features` section.
        blocks: Names of the model's repeated blocks, in execution order. Patterns in a feature's plan win over them.
        model_args: The `model` section, for its keys `skip_*_recompute`; as if it were empty when None.
        towers: Names of the towers in front of a language model, whose blocks have no rows.
    """

    def __init__(
        self,
        features: FeatureArguments,
        blocks: Sequence[str] = (),
        *,
        model_args: ModelArguments | None = None,
        towers: Collection[str] = (),
    ) -> None:
        self._features = features
        self._blocks = tuple(blocks)
        self._model_args = model_args or ModelArguments()
        self._towers = tuple(towers)

    def __call__(self, model: nn.Module) -> nn.Module:
        """All steps of this applier, for a model that is not sharded."""
        self.pre_fully_shard_apply(model)
        self.post_fully_shard_apply(model)
        return model

    def pre_fully_shard_apply(self, model: nn.Module) -> None:
        """Steps before sharding; each works on what those above it made.

        Raises:
            ConfigError: See `check`.
        """
        self.check(whole_of(model))
        if not self._keeps_operations:
            self._compile(model, ForwardKind.COMPILE)  # innermost: what stands around a block is not traced
        self._recompute(model)
        if self._keeps_operations:
            # What is kept is asked of single operations, which a graph hides.
            self._compile(model, ForwardKind.COMPILE_RECOMPUTED)
        self._offload_activations(model)
        self._run_in_slices(model)

    def post_fully_shard_apply(self, model: nn.Module) -> None:
        """Steps after sharding; no feature of this version has one."""

    def check(self, model: nn.Module) -> None:
        """Raise `ConfigError` for what a whole model, which stays as it is, cannot do: a pattern matches nothing or
        what is never called, modules lie inside one another, layers that a key is about are missing."""
        modules = self.modules_by_key(model)
        _check_apart(modules.get(OFFLOAD_MODULES, ()), modules.get(RECOMPUTE_MODULES, ()))
        if self._features.recompute:
            check_skipped_kernels(model, self._model_args)
        if self._features.compile:
            check_compile(model, self._features.compile_plan, self._blocks)

    def modules_to_recompute(self, model: nn.Module) -> list[str]:
        """Names of the modules that `features.recompute` is about, whether it is on or not.

        Raises:
            ConfigError: See `check`.
        """
        return select_modules(model, self._features.recompute_plan.apply_modules, self._blocks, RECOMPUTE_MODULES)

    @property
    def _keeps_operations(self) -> bool:
        """Whether recomputation keeps results of single operations."""
        is_selective = self._features.recompute_plan.mode == "selective"
        return self._features.recompute and (is_selective or self._model_args.skip_flash_attn_recompute)

    def _compile(self, model: nn.Module, kind: ForwardKind) -> None:
        if self._features.compile:
            compile_blocks(model, self._features.compile_plan, self._blocks, kind)

    def modules_by_key(self, model: nn.Module) -> dict[str, list[str]]:
        """Key of a feature that is on → names of the modules that it is about.

        Raises:
            ConfigError: See `check`.
        """
        asked = {
            RECOMPUTE_MODULES: (self._features.recompute, self.modules_to_recompute),
            OFFLOAD_MODULES: (self._features.enable_activation_offload, self._modules_to_offload),
            SLICED_MODULES: (self._features.enable_chunk_mbs, self._modules_to_slice),
        }
        return {key: names_of(model) for key, (is_on, names_of) in asked.items() if is_on}

    def _recompute(self, model: nn.Module) -> None:
        if not self._features.recompute:
            return
        plan = self._features.recompute_plan
        names = own_names(model, self.modules_to_recompute(whole_of(model)))
        contexts = apply_kept_results(model, plan, self._model_args)
        recompute_modules(model, names, use_reentrant=plan.use_reentrant, contexts=contexts)

    def _offload_activations(self, model: nn.Module) -> None:
        if self._features.enable_activation_offload:
            offload_activations(model, own_names(model, self._modules_to_offload(whole_of(model))))

    def _run_in_slices(self, model: nn.Module) -> None:
        if self._features.enable_chunk_mbs:
            names = own_names(model, self._modules_to_slice(whole_of(model)))
            run_in_slices(model, names, self._features.chunkmbs_plan)

    def _modules_to_offload(self, model: nn.Module) -> list[str]:
        patterns = self._features.activation_offload_plan.apply_modules
        return select_modules(model, patterns, self._blocks, OFFLOAD_MODULES)

    def _modules_to_slice(self, model: nn.Module) -> list[str]:
        with_rows = [name for name in self._blocks if not name.startswith(tuple(f"{tower}." for tower in self._towers))]
        found = select_modules(model, self._features.chunkmbs_plan.apply_modules, with_rows, SLICED_MODULES)
        check_slices(model, found, self._features.chunkmbs_plan)
        return found


def _check_apart(offloaded: Sequence[str], recomputed: Sequence[str]) -> None:
    for outer in recomputed:
        if inner := next((name for name in offloaded if name.startswith(f"{outer}.")), None):
            raise ConfigError(
                f"'{inner}' lies inside '{outer}', which is computed again instead of keeping anything",
                key=OFFLOAD_MODULES,
                way_out=f"Name '{outer}': its input is then kept on the host.",
            )
