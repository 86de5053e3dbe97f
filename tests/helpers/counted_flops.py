"""Formulas for torch's counter of FLOPs, where its own count what is not a product of a model."""

from __future__ import annotations

import math
from typing import Any


def batched_product(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """transformers 5.17 multiplies positions with frequencies as a product over one number, which sums nothing."""
    return 0 if left[2] == 1 else 2 * math.prod(left) * right[2]
