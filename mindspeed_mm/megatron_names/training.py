"""`megatron.training`, its `utils` and its `arguments`: what entries import of them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch
import torch.distributed as dist

from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state
from mindspeed_mm.fsdp.train.provider.live import live_args

get_args = live_args


def core_transformer_config_from_args(args: Namespace) -> Namespace:
    """The configuration of a model, of the flags: a copy, whose attributes have their names.

    Args:
        args: Of `get_args()`.
    """
    return Namespace(**vars(args))


def print_rank_0(message: object) -> None:
    """Print on the first rank alone."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def print_rank_last(message: object) -> None:
    """Print on the last rank alone."""
    if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
        print(message, flush=True)


def average_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """The means of some numbers over the ranks that read different samples, as one vector.

    Args:
        losses: Of one element each.
    """
    averaged = torch.cat([loss.detach().clone().reshape(1) for loss in losses])
    state = get_parallel_state()
    if state.data_size > 1:
        dist.all_reduce(averaged, group=state.axis_group("dp"))
    return averaged / state.data_size


def unwrap_model(model: object, *_classes: object) -> object:
    """The model, or each of a list: nothing wraps it here."""
    return model
