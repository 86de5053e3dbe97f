"""Keeps the garbage collector away from what stays: modules, models and their settings are millions of objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FROZEN_AT_FIRST = gc.get_freeze_count()
"""Objects that the interpreter itself keeps from the collector; some, from Python 3.12 on."""
_stays_frozen = False
"""Whether `freeze_for_good` has been called in this process."""
_NEVER = 1_000_000
"""Collections of new objects after which older ones are looked through."""


def freeze_for_good() -> None:
    """Pass over all that there is now, as long as the process lives: in a copy of a server, or before many runs in one
    process. Counting what is frozen takes up to a tenth of a second, at every run, and is left out after this."""
    global _stays_frozen
    gc.freeze()
    _stays_frozen = True


@contextmanager
def collecting_later() -> Iterator[None]:
    """No garbage collection inside, or until `passed_over_by_collection` turns it on again: imports and set-up make
    millions of objects that stay, and looking through them over and over is a fifth of the start (`python -m benchmarks
    startup`)."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def collecting_what_is_new() -> Iterator[None]:
    """Inside `collecting_later`, for code that leaves much garbage behind: what is made inside is looked through once,
    while it is new; what was there before is not looked at."""
    if gc.isenabled() or _is_frozen():
        yield
        return
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.unfreeze()  # all that there is now counts as old: unfrozen objects come back into the oldest generation
    gc.set_threshold(thresholds[0], _NEVER, _NEVER)
    gc.enable()
    try:
        yield
    finally:
        gc.disable()
        gc.set_threshold(*thresholds)


@contextmanager
def passed_over_by_collection() -> Iterator[None]:
    """Inside, the garbage collector passes over what has been built: it need not look at it, and worker processes do
    not copy its pages. Afterwards it may collect it: a model's cycles hold its process group, whose threads wake a
    hundred times a second."""
    # By the caller, whose own objects thawing would thaw, too.
    was_frozen = _is_frozen()
    if not was_frozen:
        gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def _is_frozen() -> bool:
    return _stays_frozen or gc.get_freeze_count() > _FROZEN_AT_FIRST
