"""Tensors that live on the host: gradients that leave the device as soon as they are whole and are added up there over
the micro-batches, and work in buckets.

`p.grad` is then None: a tensor's gradient must lie beside it. What it would be is read with `offloaded(p)`. Norms are
taken on the device before a gradient leaves it, and the clip factor is multiplied in when it is used: nothing waits.

While one bucket is worked on, the next comes in and the last goes home. Two buffers on the device take turns. On an
accelerator the copies run beside the computation; on a CPU the same copies are made, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import nn

from mindspeed_mm.fsdp.models.loading.local_shard import local, room_like
from mindspeed_mm.fsdp.utils.device import CopyStream

_NAME = "_mm_offloaded"


@dataclass
class OffloadedGradient:
    """The gradient of one parameter."""

    host: torch.Tensor
    """As the parameter is cut; its memory is kept from step to step."""
    norm: torch.Tensor
    """2-norm of this rank's part, on the device."""
    factor: torch.Tensor | None = None
    """What it is yet to be multiplied by."""
    is_held: bool = True
    """Whether there is a gradient."""

    def on_device(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy beside the parameter, this rank's part, multiplied."""
        gradient = local(self.host).to(local(parameter).device, non_blocking=True, copy=True)
        if self.factor is not None:
            gradient.mul_(self.factor)
        return gradient


def offload_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """From now on let gradients leave the device; `set_gradient_sync` must let every micro-batch communicate."""
    for parameter in parameters:
        if parameter.requires_grad:
            # FSDP2 calls it when the gradient is summed over ranks, on the queue that summed it.
            parameter.register_post_accumulate_grad_hook(_leave)


def offloaded(parameter: torch.Tensor) -> OffloadedGradient | None:
    """The gradient that has left the device; None where there is none."""
    kept: OffloadedGradient | None = vars(parameter).get(_NAME)
    if kept is None or not kept.is_held:
        return None
    return kept


def own_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient that there is, on the device, wherever it is kept; to be read, not written."""
    kept = offloaded(parameter)
    if kept is not None:
        return kept.on_device(parameter)
    assert parameter.grad is not None
    return local(parameter.grad)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient, cut as its parameter is, wherever it is kept; None where there is none. To be read, not written."""
    if offloaded(parameter) is None:
        return parameter.grad
    own = own_gradient(parameter)
    whole = room_like(parameter, own.dtype, own.device)
    local(whole).copy_(own)
    return whole


def forget_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Drop the gradients on the host, as `zero_grad` does on the device; their memory is kept."""
    for parameter in parameters:
        kept = offloaded(parameter)
        if kept is not None:
            kept.is_held, kept.factor = False, None


@torch.no_grad()
def _leave(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    gradient, kept = local(parameter.grad), vars(parameter).get(_NAME)
    if kept is None:
        host = room_like(parameter, gradient.dtype, torch.device("cpu"))
        kept = OffloadedGradient(host, norm=gradient.new_zeros(()), is_held=False)
        setattr(parameter, _NAME, kept)
    if kept.is_held:  # added where the computation is: adding on the host would have to wait for the copy
        gradient.add_(local(kept.host).to(gradient.device, non_blocking=True))
    local(kept.host).copy_(gradient, non_blocking=True)
    dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    (kept.norm,) = torch._foreach_norm([gradient], 2.0, dtype=dtype)
    kept.is_held, kept.factor, parameter.grad = True, None, None


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
