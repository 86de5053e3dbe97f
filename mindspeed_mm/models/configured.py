"""The model that flags and model.json name, as `mm train` builds it."""

from __future__ import annotations

from typing import Any

from torch import nn

from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.train.provider.front import ModelFront
from mindspeed_mm.fsdp.train.provider.live import live_trainer
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype


class ConfiguredModel(ModelFront):
    """A front over the model of the run's configuration, which is built without values: they come from its folder, or
    from `--load`, straight into the shards.

    Args:
        config: The model's section, kept as `config`. What is built is decided by the configuration that it was
            translated to: sizes that differ from the folder's are refused there.
    """

    def __init__(self, config: Any = None, **_kwargs: Any) -> None:
        super().__init__(build_configured())
        self.config = config


def build_configured() -> nn.Module:
    """The model of the run's configuration, parameters on meta.

    Raises:
        ConfigError: No run is under way, or the model cannot be had as the configuration says.
    """
    arguments = live_trainer("model_provider").arguments
    param_dtype = torch_dtype(arguments.parallel.fsdp_plan.param_dtype)
    return ModelHub.build(arguments.model, param_dtype=param_dtype, feature_args=arguments.features)
