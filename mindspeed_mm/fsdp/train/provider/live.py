"""The run that this process is in, for functions of the user, which are called without it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mindspeed_mm.core.config_path import value_at
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.utils.at_hand import held_arguments
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.provider.flags import FLAGS

if TYPE_CHECKING:  # it imports this module
    from mindspeed_mm.fsdp.train.provider.trainer import ProviderTrainer


class LiveRun:
    """What `get_args`, `train` and `train_step` refer to."""

    args: Namespace | None = None
    """The parsed flags."""
    trainer: ProviderTrainer | None = None
    """The trainer, from the moment it begins until it ends."""
    data_json: Mapping[str, Any]
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
