"""Batches on their way: from worker to trainer through memory that both already share, and to the device while the
current step is trained on.

torch sends every tensor as a file descriptor through a socket, for which the trainer waits on a busy worker. Here a
worker writes the batch into a slot, and only a short note travels; the trainer copies the slot out, which frees it.

What is counted of a batch is counted on the host, so a batch keeps its tensors there, each with the copy that was begun
for it; `moved` hands that out. On a CPU there is nothing to copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.byte_pixels import bytes_of
from mindspeed_mm.fsdp.utils.device import copied_to, current_device

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
    others: JsonObject


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
                # As bytes: one copy for every type.
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


_COPY = "_copy_under_way"


class _Copy(NamedTuple):
    """A tensor on its way."""

    tensor: torch.Tensor
    arrived: torch.Event


def preloaded(steps: Iterable[list[Batch]]) -> Iterator[list[Batch]]:
    """Steps, each handed out when the copies of the next have begun."""
    device = current_device()
    if device.type == "cpu":
        yield from steps
        return
    stream, waiting = torch.Stream(device), None
    for step in steps:
        _begin_copies(step, device, stream)
        if waiting is not None:
            yield waiting
        waiting = step
    if waiting is not None:
        yield waiting


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device: the copy that was begun, or a new one; of bytes, the numbers they stand for."""
    if (coded := bytes_of(tensor)) is not None:
        codes, levels = coded
        return levels.numbers(moved(codes, device))
    copy: _Copy | None = getattr(tensor, _COPY, None)
    if copy is None:
        return copied_to(tensor, device)
    current = torch.accelerator.current_stream(device)
    current.wait_event(copy.arrived)
    copy.tensor.record_stream(current)  # its memory is the other stream's, and must not be used again before
    return copy.tensor


def _begin_copies(step: list[Batch], device: torch.device, stream: torch.Stream) -> None:
    arrived, copies = torch.Event(device), []
    with stream:
        for batch in step:
            for value in batch.values():
                if isinstance(value, torch.Tensor):
                    coded = bytes_of(value)
                    tensor = value
                    if coded is not None:
                        tensor, _ = coded
                    copies.append((tensor, copied_to(tensor, device)))
        arrived.record(stream)
    for tensor, copy in copies:
        setattr(tensor, _COPY, _Copy(copy, arrived))
