"""The run that this process is in, for functions of the user, which are called without it; and the model as their
forward step sees it, around the library's module that is planned, sharded and saved.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from mindspeed_mm.core.config_path import value_at
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.utils.at_hand import held_arguments
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.provider.flags import FLAGS

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.train.provider.trainer import ProviderTrainer


class LiveRun:
    """What `get_args`, `train` and `train_step` refer to."""

    args: Namespace | None = None
    """The parsed flags."""
    trainer: ProviderTrainer | None = None
    """The trainer, from the moment it begins until it ends."""
    data_json: JsonMapping
    """The file of `--mm-data`, as it was read."""

    def __init__(self) -> None:
        self.data_json = {}


LIVE = LiveRun()
"""One a process: as in Megatron-LM, functions of the user find their arguments without being handed them."""


def live_args() -> Namespace:
    """The flags of the run; of one that a YAML started, those that its keys stand for (`flags_of`).

    Raises:
        ConfigError: There is no run yet.
    """
    arguments = held_arguments()
    if LIVE.args is None and arguments is not None:
        return flags_of(arguments)
    if LIVE.args is None:
        raise ConfigError(
            "there are no arguments yet",
            key="get_args",
            way_out="Call it in a function that pretrain calls, or call parse_args and set_args first.",
        )
    return LIVE.args


def flags_of(arguments: Arguments) -> Namespace:
    """A configuration as models of MindSpeed-LLM and MindSpeed-MM ask for it: each flag that has a key of its own, with
    `ep_dispatcher` and `params_dtype`."""
    args = Namespace(
        ep_dispatcher=arguments.parallel.ep_plan.dispatcher,
        params_dtype=torch_dtype(arguments.parallel.fsdp_plan.computed_in),
    )
    for flag in FLAGS:
        if flag.key:
            setattr(args, flag.dest, value_at(arguments, flag.key))
    return args


def live_trainer(name: str) -> ProviderTrainer:
    """The run's trainer.

    Args:
        name: Of the function that asks.

    Raises:
        ConfigError: No run is under way.
    """
    if LIVE.trainer is None:
        raise ConfigError("no training is under way", key=name, way_out="Call pretrain, which builds what it needs.")
    return LIVE.trainer


class ModelFront(nn.Module):
    """Calls go to the module inside. A forward step is given the front, everybody else the module.

    Args:
        model: The library's module; in a pipeline the stage that runs takes its place.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def present(self, model: nn.Module) -> nn.Module:
        """Return the front, with `model` as the module inside from now on."""
        if self._modules["model"] is not model:
            self._modules["model"] = model
        return self

    @property
    def module(self) -> Self:
        """The front itself, which code that reaches through wrappers (`model.module.module`) finds."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module inside returns."""
        return self.model(*args, **kwargs)
