"""The attention kernels that this process computes by: what the device and the installed packages allow, put into force
for every call of torch's attention, whoever makes it.

FA3 and FA4 are put below torch's own flash operators (`torch.nn.attention.activate_flash_attention_impl`): packed rows,
rings, towers and generators call these operators, and come to the same kernel. Likewise, torch's function tries cuDNN
first where that is the fastest. Nothing is touched on a CPU.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch
import torch.nn.attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from mindspeed_mm.fsdp.ops.attention_kernels import (
    BY_NAME,
    CUDNN,
    EAGER,
    PACKAGES,
    TORCH_FLASH,
    Device,
    Kernel,
    Need,
    choose_kernel,
)
from mindspeed_mm.fsdp.utils.device import device_capability, get_device_type


def device_facts() -> Device:
    """What the choice of a kernel depends on, of this process; packages are looked up without importing them."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    is_of_nvidia = torch.version.hip is None
    capability = device_capability() if is_of_nvidia else (0, 0)
    cudnn = torch.backends.cudnn.version() if capability != (0, 0) else None
    return Device(get_device_type(), capability, cudnn or 0, installed)


def need_of(query: torch.Tensor, value: torch.Tensor, **asked: bool) -> Need:
    """What a call asks of a kernel: by its tensors, whose last dimension is the width of a head, and what `asked` names
    (`packed`, `mask` …)."""
    asks = [name for name, is_asked in asked.items() if is_asked]
    if query.dtype not in (torch.bfloat16, torch.float16):
        asks.append("fp32")
    if query.shape[-1] != value.shape[-1]:
        asks.append("two widths")
    return Need(tuple(asks), query.shape[-1])


class KernelsInForce:
    """What torch's attention operators come to in this process."""

    def __init__(self) -> None:
        self.flash: Kernel | None = BY_NAME[TORCH_FLASH]
        """What torch's flash operators come to; None where the device has none."""
        self._needs: list[Need] = []
        self._broken: dict[str, str] = {}
        self._order = ExitStack()

    def serve(self, need: Need, device: Device) -> Device:
        """Put the kernel for a model into force. Of several models in a process, the fastest that fails for none: an
        FA3 that met dropout would raise.

        Args:
            need: Of the model. Only its dropout and its width count: a call that asks for other things takes another
                way by itself. So do all calls of a model in fp32.
            device: Of the process; without packages that must not be used.

        Returns:
            The device as it turned out: which packages do not load, and why.
        """
        if device.kind != "cuda" or "fp32" in need.asks:
            return device
        self._needs.append(need)
        asks = {ask for each in self._needs for ask in each.asks if ask == "dropout"}
        least = Need(tuple(asks), max(each.width for each in self._needs))
        kernel = None
        while kernel is None:
            device = replace(device, broken=dict(self._broken))
            kernel = self._loaded(choose_kernel(least, device).kernel)
        self._try_first(kernel, device)
        self.flash = kernel if kernel.of_torch else BY_NAME[TORCH_FLASH]
        if self.flash.lacks_device(device):
            self.flash = None
        return device

    def _loaded(self, kernel: Kernel) -> Kernel | None:
        """The kernel, below torch's flash operators if it is not torch's own; None where it does not load."""
        why = _replace_flash(kernel)
        if not why or kernel.package is None:
            return kernel
        self._broken[kernel.package.distribution] = f"{kernel.package.distribution} does not load: {why}"
        return None

    def choose(self, need: Need, kind: str) -> Kernel:
        """The kernel of a call on a device of that kind that torch's operators come to: the flash kernel in force where
        it does what is needed."""
        if kind != "cuda":
            return choose_kernel(need, Device(kind)).kernel
        if self.flash is not None and not self.flash.refuses(need):
            return self.flash
        if not BY_NAME["sdpa"].refuses(need):
            return BY_NAME["sdpa"]
        return BY_NAME[EAGER]

    def _try_first(self, kernel: Kernel, device: Device) -> None:
        """Let torch's function try this kernel before others, until another is put into force. A cuDNN that is too old
        is not tried at all."""
        self._order.close()
        if not kernel.of_torch and kernel.name != CUDNN:
            return
        cudnn = BY_NAME[CUDNN]
        order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        if not cudnn.lacks_device(device) and not cudnn.lacks_package(device):
            order.insert(1 if kernel.of_torch else 0, SDPBackend.CUDNN_ATTENTION)
        self._order.enter_context(sdpa_kernel(order, set_priority=True))


IN_FORCE = KernelsInForce()


def _replace_flash(kernel: Kernel) -> str:
    """Let torch's flash operators come to this kernel, or to torch's own again; why it cannot be, empty where it is."""
    register: Any = torch.nn.attention
    known = register.list_flash_attention_impls() if hasattr(register, "list_flash_attention_impls") else []
    if known and register.current_flash_attention_impl() == (kernel.of_torch or None):
        return ""
    if not kernel.of_torch:
        if known:
            register.restore_flash_attention_impl()
        return ""
    if kernel.of_torch not in known:
        return f"torch {torch.__version__} knows no {kernel.of_torch}"
    try:
        register.activate_flash_attention_impl(kernel.of_torch)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return next(iter(str(error).splitlines()), type(error).__name__)
    return ""
