"""Models that shard themselves, by a hook of their own."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from mindspeed_mm.fsdp.params.parallel_args import FsdpPlan
from mindspeed_mm.fsdp.utils.model_parts import attribute_at


def own_sharding(model: nn.Module) -> Callable[[FsdpPlan], bool] | None:
    """A model's `fully_shard(fsdp_plan)`, which returns whether it has done the work; None where it has none.

    A base class may bring the hook for those of its models that need one: it then has `shards_itself()`, too, which is
    False for the others.
    """
    decides = attribute_at(model, "shards_itself")
    if decides is not None and not decides():
        return None
    return attribute_at(model, "fully_shard")
