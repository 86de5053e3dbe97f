"""What code of several rooms knows of stages of a pipeline: how one is left, and what routers say across them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class StageExit(BaseException):
    """A stage has done its layers. It is no `Exception`: code around a forward pass that catches those lets it by.

    Args:
        streams: The hidden states that the next layer would be given; of models with several streams all of them.
    """

    def __init__(self, *streams: Tensor) -> None:
        super().__init__("the stage ends here")
        self.streams = streams


@dataclass
class RouterPassing:
    """Sums over the routers of all stages so far, which travel beside the hidden states of a micro-batch: a term over
    the layers of all stages is computed by the last one, and its gradients come back the same way."""

    numbers: int
    """How many there are."""
    dtype: torch.dtype
    """fp32 at least: what is counted must stay exact."""
    received: Tensor | None = None
    """(numbers,) of the stages in front of the one that runs; None on the first one."""
    sent: Tensor | None = None
    """(numbers,) with those of the stage that has run."""

    def leaving(self, like: Tensor) -> Tensor:
        """What the stage that has run hands on; zeros where its routers were not asked.

        Args:
            like: A tensor of its device.
        """
        sent, self.sent = self.sent, None
        return torch.zeros(self.numbers, dtype=self.dtype, device=like.device) if sent is None else sent
