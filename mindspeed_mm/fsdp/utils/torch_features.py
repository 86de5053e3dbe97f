"""What the installed torch can do, where releases that are supported differ: asked for, never told by a version."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def takes_argument(function: Callable[..., Any], name: str) -> bool:
    """Whether a function of torch has an argument of that name: `varlen_attn` has `enable_gqa` since 2.13."""
    return name in inspect.signature(function).parameters
