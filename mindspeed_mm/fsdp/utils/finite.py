"""Looks for NaN and infinity in weights."""

from __future__ import annotations

import torch

_WITH_REDUCTIONS_BYTES = 2
"""Smallest width of the types that torch takes the least and the largest number of."""


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor of any type holds no NaN and no infinity. Waits for its device."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    numbers = tensor if tensor.element_size() >= _WITH_REDUCTIONS_BYTES else tensor.float()
    low, high = numbers.aminmax()  # one pass without a copy; NaN goes through
    return bool(low.isfinite() & high.isfinite())
