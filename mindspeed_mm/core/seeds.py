"""Numbers that depend on what they are for, and on nothing else: not on rank, worker, batch or library version."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """64 bits that depend on all parts and their order, on every machine the same."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
