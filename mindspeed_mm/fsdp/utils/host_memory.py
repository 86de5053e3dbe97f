"""Memory of the host, where it is what the model computes in."""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
KEPT_BYTES = 1 << 30
FROM_HEAP_BYTES = 32 << 20  # glibc takes no more


def keep_freed_memory() -> bool:
    """Let the C library keep up to 1 GiB that this process has freed, for what it allocates next.

    Left alone, glibc hands freed memory above a threshold back to the kernel and takes it again page by page: encoding
    a batch of clips that frees 110 MB spent 49 of 235 ms on that. What is larger than 32 MiB goes back as ever.

    Returns:
        Whether it was done: the C library is glibc and the environment does not say otherwise.
    """
    is_told = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if is_told or mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(_MMAP_THRESHOLD, FROM_HEAP_BYTES))
