"""What a checkpoint keeps of the training loop itself; it does not depend on the number of ranks, but for `rng`."""

from __future__ import annotations

from typing import NotRequired, TypedDict

import torch

from mindspeed_mm.core.json_file import JsonObject


class LoopState(TypedDict):
    """The state of the loop between two steps."""

    iteration: int
    """Steps done."""
    consumed_samples: int
    """Samples trained on, of all ranks."""
    skipped_in_a_row: int
    """Steps that were not applied, up to the latest one."""
    data_position: JsonObject
    """The next sample, as `DataPosition` writes it."""
    bad_samples: dict[str, str]
    """Rows that could not be used → reason."""
    loss_scale: NotRequired[dict[str, float]]
    """Of gradients in fp16."""
    norm_average: NotRequired[dict[str, float]]
    """Of gradient norms, where the bound of clipping follows them."""
    rng: NotRequired[dict[str, torch.Tensor] | None]
    """State of this rank's random-number generators; None where it cannot be this rank's."""
