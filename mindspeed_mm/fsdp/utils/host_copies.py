"""Copies of device memory on the host and back, beside the computation.

On an accelerator copies run in a queue of their own, to and from pinned memory, and what needs a copy waits in the
computing queue for a mark; the host never waits. On a CPU a copy is done when it returns.
"""

from __future__ import annotations

import torch

from mindspeed_mm.fsdp.utils.device import CopyStream, get_device_type


class HostCopies:
    """Copies tensors between device and host in one queue, in parallel with the computation."""

    def __init__(self) -> None:
        self._queue: CopyStream | None = None

    def to_host(self, source: torch.Tensor) -> torch.Tensor:
        """Start to copy; `source` must stay until a mark set after this was waited for.

        Args:
            source: On the device, contiguous.
        """
        pins = get_device_type() != "cpu"
        on_host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pins)
        self._copy(on_host, source, source.device)
        return on_host

    def to_device(self, on_host: torch.Tensor, where: torch.device) -> torch.Tensor:
        """Start to copy back; the result must neither be read nor given up before a mark set after this was waited
        for."""
        # Allocated for the computing queue, which is the last to use it.
        target = torch.empty_like(on_host, device=where)
        self._copy(target, on_host, where)
        return target

    def mark(self) -> torch.Event | None:
        """What has been started by now."""
        if self._queue is None:
            return None
        return self._queue.mark()

    def wait(self, mark: torch.Event | None) -> None:
        """Let what is computed from here on come after a mark."""
        if self._queue is not None:
            self._queue.wait_for(mark)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, where: torch.device) -> None:
        if self._queue is None:  # made when there is a device to make it for: models are assembled without one
            self._queue = CopyStream(where)
        self._queue.follow()  # what is copied is computed there, or its memory was used there
        with self._queue:
            target.copy_(source, non_blocking=True)
