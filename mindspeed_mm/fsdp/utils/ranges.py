"""Names for the parts of a step in a profile's trace. While nothing is recorded a name costs one comparison.

The names are a contract between the training loop, which says them, and the analysis of traces, which looks for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

STEP = "mm.step "
"""Followed by the step's number."""
MODULE = "mm.module "
"""Followed by a module's name."""
DATA_WAIT = "mm.data wait"
PREPARE = "mm.prepare"
TO_DEVICE = "mm.host to device"
FORWARD = "mm.forward"
BACKWARD = "mm.backward"
PIPELINE = "mm.forward and backward"
CLIP = "mm.clip"
OPTIMIZER = "mm.optimizer"
READ = "mm.read numbers"
PHASES = (DATA_WAIT, PREPARE, TO_DEVICE, FORWARD, BACKWARD, PIPELINE, CLIP, READ, OPTIMIZER)
"""Parts of a step, in its order."""

_NOTHING: AbstractContextManager[object] = nullcontext()
_is_recording = False


def named(name: str) -> AbstractContextManager[object]:
    """A part of the step under this name, for a profiler that records."""
    if not _is_recording:
        return _NOTHING
    from torch.profiler import record_function  # the analysis of traces reads the names above and does without torch

    return record_function(name)


@contextmanager
def recording() -> Iterator[None]:
    """While inside, names are recorded."""
    global _is_recording
    _is_recording = True
    try:
        yield
    finally:
        _is_recording = False
