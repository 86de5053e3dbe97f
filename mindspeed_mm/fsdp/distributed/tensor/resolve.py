"""The tensor plan of a model with everything that speaks against it. Pure: nothing is changed."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from mindspeed_mm.fsdp.distributed.tensor.apply import with_adapters
from mindspeed_mm.fsdp.distributed.tensor.plan import TensorPlan, resolve_tensor_plan
from mindspeed_mm.fsdp.distributed.tensor.sequence import sequence_regions
from mindspeed_mm.fsdp.distributed.tensor.sizes import check_split_sizes
from mindspeed_mm.fsdp.params.parallel_args import TpPlan


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
    plan = resolve_tensor_plan(model, tp_plan).without(whole)
    check_split_sizes(model, plan, size)
    sequence_regions(model, plan)
    for name, rule in plan.rules.items():
        with_adapters(model, name, rule, in_sequence=False)
    return plan
