"""What loss functions and batches of MindSpeed-MM's scripts call."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state


def compute_token_level_loss(output: JsonMapping) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of a loss over label tokens, and their number.

    Args:
        output: `loss`, one mean over the label tokens or one value for each; `loss_mask`, 1 where a token has a label.

    Returns:
        (2,) the sum and the number, with gradients; the number, 0-d int; (2,) both, summed over the data ranks.
    """
    mask = output["loss_mask"].reshape(-1).float()
    loss = output["loss"].reshape(-1)
    both = torch.stack([(loss * mask).sum(), mask.sum()])
    reported = both.detach().clone()
    state = get_parallel_state()
    if state.data_size > 1:
        dist.all_reduce(reported, group=state.axis_group("dp"))
    return both, both[1].detach().to(torch.int), reported


class EncoderBalanceComm:
    """Samples of towers are balanced over ranks by the plan (`--encoder-dp-balance`), inside of the model."""

    @staticmethod
    def apply(samples: torch.Tensor, _group: object = None) -> tuple[torch.Tensor, None]:
        """The samples as they are, and nothing to undo."""
        return samples, None
