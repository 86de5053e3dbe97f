"""Functions that no compiler may look into: they read sizes from the device, or talk to other ranks.

torch.compile would cut its graph at the reading, and compile again for every number read. Marked functions run as they
are, between two graphs; while nothing is compiled, the mark costs one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_MARKED: list[Any] = []


def outside_graphs(function: F) -> F:
    """Mark a function or method; `draw_graph_borders` makes the marks count."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return call.runs(*args, **kwargs)  # type: ignore[attr-defined]

    call.runs = function  # type: ignore[attr-defined]
    _MARKED.append(call)
    return call  # type: ignore[return-value]


def draw_graph_borders() -> None:
    """Keep the compiler out of all marked functions. May be called again."""
    for call in _MARKED:
        call.runs = torch.compiler.disable(call.__wrapped__)  # it imports the compiler: not before one is asked for
