"""How much the vision tower of Qwen3-VL is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel


@contextmanager
def counted_patches() -> Iterator[list[int]]:
    """How many patches the tower was given, call by call."""
    seen: list[int] = []
    real = Qwen3VLVisionModel.forward

    @wraps(real)
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(hidden_states))
        return real(self, hidden_states, *args, **kwargs)

    with mock.patch.object(Qwen3VLVisionModel, "forward", forward):
        yield seen
