"""The only door to an accelerator, built on `torch.accelerator`; on a CPU every call is a harmless no-op.

`torch.cuda`, `torch.npu` and `torch_npu` appear nowhere else in the project.
"""

from __future__ import annotations

import importlib
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.utils.host_memory import available_bytes, keep_freed_memory, total_bytes

_PINNED_AT_ONCE_BYTES = 16 * 2**20
"""Tensors up to this size are copied to locked memory on their way: larger ones come from the loader, which knows
whether to lock them."""
_DETERMINISTIC: Mapping[str, Mapping[str, str]] = {
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"},
    "npu": {"HCCL_DETERMINISTIC": "true", "LCCL_DETERMINISTIC": "1", "FLASH_ATTENTION_DETERMINISTIC": "1"},
}
"""What libraries below torch read from the environment."""
_CUBLAS_WORKSPACES = (":4096:8", ":16:8")


def get_device_type() -> str:
    """`cuda`, `npu`, `xpu`, … or `cpu`."""
    if not torch.accelerator.is_available():
        return "cpu"
    accelerator = torch.accelerator.current_accelerator()
    if accelerator:
        return accelerator.type
    return "cpu"


def get_torch_device() -> ModuleType:
    """The module of this device type: `torch.cuda`, `torch.npu`, … or `torch.cpu`."""
    return torch.get_device_module(get_device_type())


def current_device() -> torch.device:
    """The device that this process computes on."""
    device_type = get_device_type()
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def let_cuda_mean_this_device() -> None:
    """Make `torch.cuda.current_device()` the device of this process where there is no CUDA, for scripts that put their
    batches there."""
    if get_device_type() != "cuda":
        torch.get_device_module("cuda").current_device = current_device


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
            f"{ranks} ranks on this host need {ranks} devices, but it has {torch.accelerator.device_count()} "
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


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Only kernels that give the same bits each time: those of torch, cuDNN, cuBLAS and flash attention on CUDA, those
    of torch, HCCL and flash attention on NPUs. Where there is none for an operation, torch raises.

    Raises:
        MachineError: The environment names a cuBLAS workspace that is not deterministic.
    """
    wanted = _DETERMINISTIC.get(get_device_type(), {})
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if "CUBLAS_WORKSPACE_CONFIG" in wanted and workspace not in (None, *_CUBLAS_WORKSPACES):
        raise MachineError(
            f"the environment sets CUBLAS_WORKSPACE_CONFIG={workspace}, with which cuBLAS is not deterministic",
            key="training.use_deter_comp",
            way_out=f"Unset it, or set it to {' or '.join(_CUBLAS_WORKSPACES)}.",
        )
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    cudnn: Any = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    os.environ.update(added)
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        enabled, cudnn.deterministic, cudnn.benchmark = before
        torch.use_deterministic_algorithms(enabled)
        for name in added:
            os.environ.pop(name, None)


def device_capability() -> tuple[int, int]:
    """Compute capability of this process's CUDA device; (0, 0) of any other."""
    if get_device_type() != "cuda":
        return 0, 0
    major, minor = get_torch_device().get_device_capability()
    return int(major), int(minor)


def npu_operator(name: str, *, key: str) -> Callable[..., Any]:
    """A fused operator of torch_npu.

    Raises:
        MachineError: This is not an NPU, or its torch_npu has no such operator.
    """
    if get_device_type() == "npu":
        operator: Callable[..., Any] | None = getattr(importlib.import_module("torch_npu"), name, None)
        if operator is not None:
            return operator
    raise MachineError(f"needs torch_npu's {name}, which is not installed", key=key, way_out="Leave the key out.")


def copied_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on its way to the device; the host does not wait. From host memory that is not locked, it would first
    wait for all that is queued there; a tensor that comes to the host has arrived."""
    if device.type == "cpu":
        return tensor.to(device)
    if tensor.device.type == "cpu" and not tensor.is_pinned() and tensor.nbytes <= _PINNED_AT_ONCE_BYTES:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def distributed_backend() -> str:
    """The collective library of this device: gloo, nccl, hccl, xccl."""
    return dist.get_default_backend_for_device(get_device_type())


def device_to_bind() -> torch.device | None:
    """What a job's process group is told to be of from the start, so that NCCL connects at once, splits the groups of a
    mesh from one another and never guesses the device. None but on CUDA: elsewhere, torch's gloo groups, which
    checkpoints use beside it, refuse to be of a device."""
    if get_device_type() == "cuda":
        return current_device()
    return None


def supports_bf16() -> bool:
    """Whether bf16 arithmetic runs here."""
    module = get_torch_device()
    if hasattr(module, "is_bf16_supported"):
        return bool(module.is_bf16_supported())
    return True


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


def memory_total_bytes() -> int:
    """Memory of this process's device: the accelerator's, or the host's."""
    if get_device_type() != "cpu":
        return int(torch.accelerator.get_memory_info()[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_in_use() -> str:
    """What the accelerator's allocator holds, in words; empty on a CPU, whose allocator keeps no books."""
    if get_device_type() == "cpu":
        return ""
    used, reserved = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
    total = memory_total_bytes()
    return f"in use {used / 2**30:.2f} GiB, reserved {reserved / 2**30:.2f} GiB, of {total / 2**30:.2f} GiB"


def rng_state() -> dict[str, torch.Tensor]:
    """Random-number state of torch on the CPU and on the accelerator."""
    state = {"cpu": torch.get_rng_state()}
    if get_device_type() != "cpu":
        state["device"] = get_torch_device().get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Restore the random-number state that `rng_state` returned: torch's on the CPU and, where the state has one, the
    accelerator's."""
    torch.set_rng_state(state["cpu"])
    if "device" in state and get_device_type() != "cpu":
        get_torch_device().set_rng_state(state["device"])


class CopyStream:
    """A queue of copies that runs beside the computation; on a CPU everything happens in its turn.

    Args:
        device: Where the computation runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._queue = torch.Stream(device) if device.type != "cpu" else None

    def __enter__(self) -> None:
        if self._queue is not None:
            self._queue.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._queue is not None:
            self._queue.__exit__(*error)

    def mark(self) -> torch.Event | None:
        """The point that the queue has come to, for `wait_for`."""
        if self._queue is not None:
            return self._queue.record_event()
        return None

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


class ArrivingNumbers:
    """A few numbers on their way to the host; what is queued on the device after them is not waited for. On a CPU they
    are there.

    Args:
        numbers: A small tensor that nothing writes to any more.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._host = numbers
        self._arrived: torch.Event | None = None
        if numbers.device.type != "cpu":
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrived = torch.accelerator.current_stream(numbers.device).record_event()

    def are_there(self) -> bool:
        """Whether reading them would not wait."""
        return self._arrived is None or self._arrived.query()

    def come_within(self, limit_s: float) -> bool:
        """Wait until they are there, so many seconds at most; whether they are."""
        end = time.monotonic() + limit_s
        while not self.are_there() and time.monotonic() < end:
            time.sleep(0.005)
        return self.are_there()

    def tolist(self) -> list[float]:
        """The numbers, when they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        found: list[float] = self._host.tolist()
        return found


def memory_room_bytes(share: float) -> int:
    """Bytes that this process may still take until the device is filled to `share`; memory of the host on a CPU."""
    if get_device_type() == "cpu":
        free, total = available_bytes(), total_bytes()  # what the disk cache holds is free
    else:
        free, total = torch.accelerator.get_memory_info()
        free += torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()
    return max(0, int(share * total) - (total - free))


# --- peak memory ------------------------------------------------------------------------------------------------------


class PeakMemory(NamedTuple):
    """Peak memory of this process in bytes, since `take_peak_memory` was last called."""

    allocated: int
    """Bytes held by tensors; on a CPU, by the whole process since it began, because the kernel does not reset it."""
    reserved: int | None
    """Held by the accelerator's allocator for tensors to come; None on a CPU."""


def take_peak_memory() -> PeakMemory:
    """The peaks since the last call, which begin anew. A host number: the device is not waited for."""
    if get_device_type() == "cpu":
        return PeakMemory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, None)
    peak = PeakMemory(torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved())
    torch.accelerator.reset_peak_memory_stats()
    return peak
