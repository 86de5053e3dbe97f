"""Work on tensors that live on the host, in buckets: while one is worked on, the next comes in and the last goes home.

Two buffers on the device take turns. On an accelerator the copies run beside the computation; on a CPU the same copies
are made, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from mindspeed_mm.fsdp.utils.device import CopyStream

MOST_BYTES = 128 << 20
"""Larger buckets win no time: moving one takes milliseconds, starting to move it microseconds."""
_ALIGNED = 512

Item = TypeVar("Item")


@dataclass
class StreamedItem(Generic[Item]):
    """Something to work on, and its tensors on the host.

    Args:
        item: Whatever the work is done on.
        updated: Host tensors, flat: they come in, and go home changed.
        read_only: Host tensors, flat, that only come in.
        extra_bytes: What the work on it takes besides.
    """

    item: Item
    updated: Sequence[torch.Tensor] = ()
    read_only: Sequence[torch.Tensor] = ()
    extra_bytes: int = 0
    staged: list[torch.Tensor] = field(default_factory=list)
    """While it is worked on: copies of `updated` and `read_only` on the device."""

    @property
    def moved_bytes(self) -> int:
        """Room that it takes in a buffer."""
        return sum(_room(tensor) for tensor in (*self.updated, *self.read_only))


def bucket_bytes(room: int) -> int:
    """Size of a bucket where so many bytes may be used: two are on the device at a time, and work takes a third."""
    return max(0, min(MOST_BYTES, room // 3))


def in_buckets(items: Iterable[StreamedItem[Item]], most_bytes: int) -> Iterator[list[StreamedItem[Item]]]:
    """Consecutive pieces, as many as fit; at least one."""
    bucket: list[StreamedItem[Item]] = []
    held = 0
    for piece in items:
        size = piece.moved_bytes + piece.extra_bytes
        if bucket and held + size > most_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append(piece)
        held += size
    if bucket:
        yield bucket


def work_in_buckets(
    items: Iterable[StreamedItem[Item]],
    work: Callable[[list[StreamedItem[Item]]], None],
    most_bytes: int,
    device: torch.device,
    copies: CopyStream | None = None,
) -> None:
    """Do `work` on all pieces, bucket by bucket, with their tensors on the device.

    Args:
        items: What is worked on; their tensors on the host are pinned where there is an accelerator.
        work: Is handed the pieces of a bucket, `staged` filled; it changes the copies of `updated` in place.
        most_bytes: Of a bucket; a single piece may be larger.
        device: Where the work is done.
        copies: What runs the copies.
    """
    buckets = list(in_buckets(items, most_bytes))
    sizes = [sum(piece.moved_bytes for piece in bucket) for bucket in buckets]
    if not any(sizes):
        for bucket in buckets:
            work(bucket)
        return
    copies = copies or CopyStream(device)
    buffers = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in buckets[:2]]
    copies.follow()  # whatever last used the memory of the buffers, and wrote what comes in, comes first
    arrived = [_bring(buckets[0], buffers[0], copies)]
    for number, bucket in enumerate(buckets):
        if number + 1 < len(buckets):  # into the buffer that the bucket before this one has left
            arrived.append(_bring(buckets[number + 1], buffers[(number + 1) % 2], copies))
        copies.wait_for(arrived[number])
        work(bucket)
        copies.follow()
        _take_home(bucket, copies)
    copies.finish()


def _bring(bucket: list[StreamedItem[Item]], buffer: torch.Tensor, copies: CopyStream) -> torch.Event | None:
    start = 0
    with copies:
        for piece in bucket:
            piece.staged = []
            for tensor in (*piece.updated, *piece.read_only):
                size = tensor.numel() * tensor.element_size()
                copy = buffer[start : start + size].view(tensor.dtype)
                copy.copy_(tensor, non_blocking=True)
                piece.staged.append(copy)
                start += _room(tensor)
        return copies.mark()


def _take_home(bucket: list[StreamedItem[Item]], copies: CopyStream) -> None:
    with copies:
        for piece in bucket:
            for home, copy in zip(piece.updated, piece.staged, strict=False):
                home.copy_(copy, non_blocking=True)
            piece.staged = []


def _room(tensor: torch.Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return -(-size // _ALIGNED) * _ALIGNED
