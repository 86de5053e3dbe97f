"""Applies the `features` section of a configuration to a model, in place.

The order is that of `fsdp/train/assemble.py`: before sharding recompute, whose modules sharding then gathers and frees
around both of their forward passes. No step renames a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.patterns import resolve_patterns
from mindspeed_mm.fsdp.features.memory.recompute import recompute_modules
from mindspeed_mm.fsdp.models.share import own_names, whole_of
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments

__all__ = ["FeaturesApplier"]

RECOMPUTE_MODULES = "features.recompute_plan.apply_modules"


class FeaturesApplier:
    """Applies features to a model; `applier(model)` takes its own steps in order.

    Args:
        features: The `features` section.
        blocks: Names of the model's repeated blocks, in execution order. Patterns in a feature's plan win over them.
    """

    def __init__(self, features: FeatureArguments, blocks: Sequence[str] = ()) -> None:
        self._features = features
        self._blocks = tuple(blocks)

    def __call__(self, model: nn.Module) -> nn.Module:
        """All steps of this applier, for a model that is not sharded."""
        self.pre_fully_shard_apply(model)
        self.post_fully_shard_apply(model)
        return model

    def pre_fully_shard_apply(self, model: nn.Module) -> None:
        """Steps before sharding: recompute.

        Raises:
            ConfigError: A pattern matches nothing or what is never called, modules lie inside one another, or the plan
                asks for what this version does not have.
        """
        plan = self._features.recompute_plan
        if not self._features.recompute:
            return
        if plan.mode != "full":
            raise ConfigError(f"'{plan.mode}' is not supported yet, only full", key="features.recompute_plan.mode")
        names = own_names(model, self.modules_to_recompute(whole_of(model)))
        recompute_modules(model, names, use_reentrant=plan.use_reentrant)

    def post_fully_shard_apply(self, model: nn.Module) -> None:
        """Steps after sharding; no feature of this version has one."""

    def modules_to_recompute(self, model: nn.Module) -> list[str]:
        """Names of the modules that `features.recompute` is about, whether it is on or not.

        Raises:
            ConfigError: See `pre_fully_shard_apply`.
        """
        patterns = self._features.recompute_plan.apply_modules
        names = [name for name, _ in model.named_modules()]
        found = resolve_patterns(patterns, names, key=RECOMPUTE_MODULES) if patterns else list(self._blocks)
        if not found:
            raise ConfigError(
                f"{type(model).__name__} names no blocks of its own to recompute",
                key=RECOMPUTE_MODULES,
                way_out="Name modules that are repeated, e.g. 'model.layers.{*}'.",
            )
        _check_called(model, found)
        _check_apart(found)
        return found


def _check_called(model: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        module = model.get_submodule(name)
        if type(module).forward is nn.Module.forward:
            raise ConfigError(
                f"'{name}' is a {type(module).__name__}, which is never called itself",
                key=RECOMPUTE_MODULES,
                way_out=f"Name what it holds: '{name}.{{*}}'.",
            )


def _check_apart(names: Sequence[str]) -> None:
    for outer in names:
        if inner := next((name for name in names if name.startswith(f"{outer}.")), None):
            raise ConfigError(
                f"'{inner}' lies inside '{outer}', which is recomputed too: it would run three times",
                key=RECOMPUTE_MODULES,
                way_out="Name one of them.",
            )
