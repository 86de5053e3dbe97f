"""Batches from worker to trainer through memory that both already share.

torch sends every tensor as a file descriptor through a socket, for which the trainer waits on a busy worker. Here a
worker writes the batch into a slot, and only a short note travels; the trainer copies the slot out, which frees it.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_mm.core.batch import Batch

SLOT_BYTES = 64 * 2**20
"""Address space of a slot; only what a batch touches is ever memory. Larger batches go torch's way."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class PackedBatch:
    """Where the parts of a batch lie in a slot."""

    slot: int
    size_bytes: int
    tensors: tuple[tuple[str, int, int, torch.dtype, tuple[int, ...]], ...]
    """Name, first byte, bytes, type and shape."""
    others: dict[str, Any]


class SharedSlots:
    """A ring of slots in anonymous memory, which forked workers inherit.

    A slot is free again when its batch was read. Request n uses slot n modulo the ring's size; torch's loader has at
    most `workers × prefetch` requests under way, and one more while it hands one out.

    Args:
        count: Slots.
        slot_bytes: Size of each.
    """

    def __init__(self, count: int, slot_bytes: int = SLOT_BYTES) -> None:
        self._count, self._slot_bytes = count, slot_bytes
        self._memory = torch.frombuffer(mmap.mmap(-1, count * slot_bytes), dtype=torch.uint8)

    def write(self, number: int, batch: Batch) -> Batch | PackedBatch:
        """Put a batch into the slot of request `number`; a batch that does not fit is returned as it is."""
        slot = number % self._count
        start, tensors, others = 0, [], {}
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                tensors.append((name, start, value.nbytes, value.dtype, tuple(value.shape)))
                start += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
            else:
                others[name] = value
        if start > self._slot_bytes:
            return batch
        memory = self._slot(slot)
        for name, first, size, _, _ in tensors:
            if size:
                memory[first : first + size].copy_(batch[name].contiguous().view(-1).view(torch.uint8))
        return PackedBatch(slot, start, tuple(tensors), others)

    def read(self, packed: PackedBatch, *, pin_memory: bool = False) -> Batch:
        """Copy a batch out of its slot; its tensors are views of one block."""
        block = torch.empty(packed.size_bytes, dtype=torch.uint8, pin_memory=pin_memory)
        block.copy_(self._slot(packed.slot)[: packed.size_bytes])
        batch: Batch = {
            name: block[first : first + size].view(dtype).view(shape)
            for name, first, size, dtype, shape in packed.tensors
        }
        return batch | packed.others

    def _slot(self, slot: int) -> torch.Tensor:
        return self._memory[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]
