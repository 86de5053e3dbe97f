"""Numbers that depend on what they are for, and on nothing else: not on rank, worker, batch or library version."""

from __future__ import annotations

import hashlib

MOST_SEED = 2**63 - 1
"""Of those that people give: torch's generators take no more, and servers of OpenAI's interface neither."""


def derive_seed(*parts: int | str) -> int:
    """64 bits that depend on all parts and their order, on every machine the same."""
    # `hash` is salted anew in each process
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
