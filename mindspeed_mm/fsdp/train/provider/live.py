"""The run that this process is in, for functions of the user, which are called without it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mindspeed_mm.core.errors import ConfigError

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
    """The flags of the run.

    Raises:
        ConfigError: There is no run yet.
    """
    if LIVE.args is None:
        raise ConfigError(
            "there are no arguments yet",
            key="get_args",
            way_out="Call it in a function that pretrain calls, or call parse_args and set_args first.",
        )
    return LIVE.args


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
