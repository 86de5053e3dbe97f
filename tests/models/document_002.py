"""The code of the migration guide (document 002), put together: a model that shards itself, and callbacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.transformers.base_model import (
    FSDP2Mixin,
    WeightInitMixin,
    set_fullyshard_modules_to_wrap,
    set_modules_to_prefetch,
    set_recompute_modules_to_wrap,
)
from tests.fsdp.train.provider.user_run import PlainModel


class CustomModel(MultiModalModule, FSDP2Mixin, WeightInitMixin):
    """The guide's first step: the model itself is left as it is."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        plain = PlainModel()
        self.blocks, self.out = plain.blocks, plain.out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return PlainModel.forward(self, x)  # type: ignore[arg-type]


class YourModel(CustomModel):
    """The guide's second step: a strategy of its own."""

    def _fully_shard(self, fsdp2_kwargs: Any = None, fsdp2_config: Any = None) -> None:
        set_recompute_modules_to_wrap()

        set_fullyshard_modules_to_wrap()

        num_to_forward_prefetch = getattr(self.fsdp2_config, "num_to_forward_prefetch", 0)
        num_to_backward_prefetch = getattr(self.fsdp2_config, "num_to_backward_prefetch", 0)
        set_modules_to_prefetch(num_to_forward_prefetch, num_to_backward_prefetch)


def build(model_class: type[nn.Module]) -> nn.Module:
    """A model with the values of `user_run.seeded_model`."""
    torch.manual_seed(5)
    model: nn.Module = model_class({"hidden_size": 6}).double()  # type: ignore[call-arg]
    return model


def units(model: nn.Module) -> list[str]:
    """Names of the modules that are sharded on their own."""
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
