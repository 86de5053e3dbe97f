"""The configuration under which this process builds or trains a model, for code of plugins that is not handed it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mindspeed_mm.fsdp.params.argument import Arguments

_HELD: list[Arguments] = []
"""The innermost last. No context variable: recomputed forward passes run in threads of autograd."""


@contextmanager
def arguments_at_hand(arguments: Arguments) -> Iterator[None]:
    """Let `held_arguments` return this configuration while a model is built or trained."""
    _HELD.append(arguments)
    try:
        yield
    finally:
        _HELD.pop()


def held_arguments() -> Arguments | None:
    """The configuration of the model that is being built or trained; None outside."""
    if _HELD:
        return _HELD[-1]
    return None
