"""The only door to an accelerator, built on `torch.accelerator`; on a CPU every call is a harmless no-op.

`torch.cuda`, `torch.npu` and `torch_npu` appear nowhere else in the project.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.utils.host_memory import keep_freed_memory


def get_device_type() -> str:
    """`cuda`, `npu`, `xpu`, … or `cpu`."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator else "cpu"


def get_torch_device() -> ModuleType:
    """The module of this device type: `torch.cuda`, `torch.npu`, … or `torch.cpu`."""
    return torch.get_device_module(get_device_type())


def current_device() -> torch.device:
    """The device that this process computes on."""
    device_type = get_device_type()
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def set_local_device(local_rank: int) -> torch.device:
    """Bind this process to accelerator `local_rank` of its host, and return it; on a CPU, keep memory at hand."""
    if get_device_type() != "cpu":
        torch.accelerator.set_device_index(local_rank)
    else:
        keep_freed_memory()
    return current_device()


def check_device_count(ranks: int) -> None:
    """Raise when this host has fewer accelerators than ranks; any number of ranks share a CPU.

    Raises:
        MachineError: Naming both numbers.
    """
    if get_device_type() != "cpu" and ranks > torch.accelerator.device_count():
        raise MachineError(
            f"{ranks} ranks on this host need {ranks} devices, and it has {torch.accelerator.device_count()} "
            f"({get_device_type()})",
            key="--nproc",
            way_out="Start fewer ranks, or make more devices visible to this process.",
        )


def allow_short_fp32(allow: bool) -> None:
    """Whether fp32 matrix products and convolutions may use the accelerator's shortened format: TF32 on CUDA, HF32 on
    NPUs. A CPU has none."""
    device_type = get_device_type()
    if device_type == "cuda":
        torch.set_float32_matmul_precision("high" if allow else "highest")
        torch.backends.cudnn.allow_tf32 = allow
    elif device_type == "npu":
        module = get_torch_device()
        module.matmul.allow_hf32 = allow
        module.conv.allow_hf32 = allow


def distributed_backend() -> str:
    """The collective library of this device: gloo, nccl, hccl, xccl."""
    return dist.get_default_backend_for_device(get_device_type())


def supports_bf16() -> bool:
    """Whether bf16 arithmetic runs here."""
    module = get_torch_device()
    return bool(module.is_bf16_supported()) if hasattr(module, "is_bf16_supported") else True


def synchronize() -> None:
    """Wait for everything queued on the accelerator."""
    if get_device_type() != "cpu":
        torch.accelerator.synchronize()


def peak_memory_bytes() -> int:
    """Peak memory held: of the accelerator's allocator, or of this process on a CPU."""
    if get_device_type() != "cpu":
        return torch.accelerator.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rng_state() -> dict[str, torch.Tensor]:
    """Random-number state of torch on the CPU and on the accelerator."""
    state = {"cpu": torch.get_rng_state()}
    if get_device_type() != "cpu":
        state["device"] = get_torch_device().get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(state["cpu"])
    if "device" in state and get_device_type() != "cpu":
        get_torch_device().set_rng_state(state["device"])


class Beside:
    """A queue of copies that runs beside the computation; on a CPU everything happens in its turn.

    Args:
        device: Where the computation runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._queue = torch.Stream(device) if device.type != "cpu" else None

    def __enter__(self) -> None:
        if self._queue is not None:
            self._queue.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._queue is not None:
            self._queue.__exit__(*error)

    def mark(self) -> torch.Event | None:
        """The point that the queue has come to, for `wait_for`."""
        return self._queue.record_event() if self._queue is not None else None

    def follow(self) -> None:
        """What is queued from here on starts after what the computation has been given so far."""
        if self._queue is not None:
            self._queue.wait_stream(torch.accelerator.current_stream(self._queue.device))

    def wait_for(self, mark: torch.Event | None) -> None:
        """Let the computation go on once the queue has passed a mark; the host does not wait."""
        if self._queue is not None and mark is not None:
            torch.accelerator.current_stream(self._queue.device).wait_event(mark)

    def finish(self) -> None:
        """Let the computation go on once the queue is empty; the host does not wait."""
        if self._queue is not None:
            torch.accelerator.current_stream(self._queue.device).wait_stream(self._queue)


def memory_room_bytes(share: float) -> int:
    """Bytes that this process may still take until the device is filled to `share`; memory of the host on a CPU."""
    if get_device_type() == "cpu":
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    else:
        free, total = torch.accelerator.get_memory_info()
        free += torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()
    return max(0, int(share * total) - (total - free))
