"""The next step's batches on their way to the device while the current step is trained on.

What is counted of a batch is counted on the host, so a batch keeps its tensors there, each with the copy that was begun
for it; `moved` hands that out. On a CPU there is nothing to copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.data.data_utils.byte_pixels import bytes_of
from mindspeed_mm.fsdp.utils.device import copied_to, current_device

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
        _begin(step, device, stream)
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


def _begin(step: list[Batch], device: torch.device, stream: torch.Stream) -> None:
    arrived, copies = torch.Event(device), []
    with stream:
        for batch in step:
            for value in batch.values():
                if isinstance(value, torch.Tensor):
                    coded = bytes_of(value)
                    tensor = value if coded is None else coded[0]
                    copies.append((tensor, copied_to(tensor, device)))
        arrived.record(stream)
    for tensor, copy in copies:
        setattr(tensor, _COPY, _Copy(copy, arrived))
