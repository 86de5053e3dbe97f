"""The tensor plan of a model with everything that speaks against it. Pure: nothing is changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.model_kinds import UNIFIED
from mindspeed_mm.core.patterns import is_inside
from mindspeed_mm.fsdp.distributed.tensor.plan import SplitRule, Style, TensorPlan, resolve_tensor_plan
from mindspeed_mm.fsdp.distributed.tensor.sequence import sequence_regions
from mindspeed_mm.fsdp.distributed.tensor.sizes import check_split_sizes
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.params.parallel_args import TpPlan
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, base_layer_of


def resolve_tensor_parallel(model: nn.Module, tp_plan: TpPlan, size: int, *, whole: Collection[str] = ()) -> TensorPlan:
    """How a model is split over the ranks of the axis `tp`.

    Args:
        model: Whole, with adapters, parameters on meta or real, ties live.
        tp_plan: The section `parallel.tp_plan`.
        size: Ranks of the axis.
        whole: Names of modules that are not split, whatever the plan says.

    Raises:
        ConfigError: The plan does not fit the model, or the number of ranks does not divide what is split.
    """
    if facts_of(model).kind is UNIFIED:
        raise ConfigError(
            f"{size}, but tensor parallelism is not built for models that answer and draw",
            key="parallel.tensor_parallel_size",
            way_out="Set it to 1: FSDP2 shards these models.",
        )
    plan = resolve_tensor_plan(model, tp_plan).without(whole)
    check_split_sizes(model, plan, size)
    stretches = sequence_regions(model, plan)
    cuts: dict[str, SplitRule] = {}
    for name, rule in plan.rules.items():
        in_sequence = any(is_inside(name, stretch.modules) for stretch in stretches)
        cuts |= _with_adapters(model, name, rule, in_sequence)
    return replace(plan, cuts=cuts)


def _with_adapters(model: nn.Module, name: str, rule: SplitRule, in_sequence: bool) -> dict[str, SplitRule]:
    """The rules of a module and of the low-rank adapters on it: (x A) B is cut where x W is.

    The half that stays whole works, under sequence parallelism, on what only this rank makes of it.

    Raises:
        ConfigError: The layer is fused of several, which an adapter cuts differently.
    """
    module = model.get_submodule(name)
    if base_layer_of(module) is module:
        return {name: rule}
    if rule.blocks or rule.style is Style.EMBEDDING:
        raise ConfigError(
            f"tensor parallelism cannot cut the adapter on {name}",
            key="training.lora.target_modules",
            way_out="Leave this module out of the adapters, or of parallel.tp_plan.",
        )
    # A reads what W reads, B writes what W writes: rows are cut in A, columns in B.
    cut_half, whole_half = ("lora_A", "lora_B") if rule.style is Style.ROW else ("lora_B", "lora_A")
    rules = {f"{name}.base_layer": rule}
    for adapter in attribute_at(module, cut_half):
        rules[f"{name}.{cut_half}.{adapter}"] = rule
        if in_sequence:
            rules[f"{name}.{whole_half}.{adapter}"] = SplitRule(Style.OWN_PART)
    return rules
