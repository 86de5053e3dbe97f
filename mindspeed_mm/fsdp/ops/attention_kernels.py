"""Which kernel computes attention: the one place that decides, for language models, towers, generators and sequences
that are spread over ranks. It knows no torch: a need and a device are handed in, the answer is a row of `KERNELS`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

WORDS = {
    "packed": "documents of one row",
    "window": "sliding windows",
    "sinks": "attention sinks",
    "softcap": "capped scores",
    "mask": "masks",
    "key mask": "masks of a spread sequence's keys",
    "dropout": "dropout",
    "lse": "sequences that are spread over ranks",
    "fp32": "other types than bf16 and fp16",
    "two widths": "values of another width than keys",
}
"""What can be asked of a kernel, with words for what it then takes."""


class Package(NamedTuple):
    """What brings a kernel that torch does not have."""

    distribution: str
    """As `importlib.metadata` knows it. A module of the same name may be another's: FA2 also has `flash_attn.cute`."""
    least: str
    """The first release that is taken."""
    install: str
    """How to get it."""


@dataclass(frozen=True)
class Need:
    """What a call of attention, or all calls of a model, ask of a kernel."""

    asks: tuple[str, ...] = ()
    """Of `WORDS`."""
    width: int = 0
    """Of the widest head; 0 where it is not known."""


@dataclass(frozen=True)
class Device:
    """The device that a kernel would run on, and what is installed beside it."""

    kind: str
    """`cuda`, `npu`, … or `cpu`."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of a device of NVIDIA; zeros for all others."""
    cudnn: int = 0
    """Version of cuDNN, as 91501."""
    installed: Mapping[str, str] = field(default_factory=dict)
    """Version of each distribution of `PACKAGES` that is installed."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Why a distribution that is installed does not load."""


@dataclass(frozen=True)
class Kernel:
    """A kernel, where it runs and what it takes."""

    name: str
    takes: tuple[str, ...]
    devices: tuple[str, ...] = ()
    """Kinds of devices; empty: all."""
    majors: Container[int] = range(100)
    """First numbers of the compute capability."""
    package: Package | None = None
    widest: int = 0
    """Widest head; 0: any."""
    multiple: int = 1
    """What divides the width of heads."""
    least_cudnn: int = 0
    of_torch: str = ""
    """Name in torch's register of flash attention, by which all its calls come to this kernel."""

    def lacks_device(self, device: Device) -> str:
        """Why this kind of device does not run it; empty where it does."""
        if self.devices and device.kind not in self.devices:
            return f"runs on {' and '.join(self.devices)} only, and this is '{device.kind}'"
        if device.capability[0] not in self.majors:
            return f"does not run on compute capability {device.capability[0]}.{device.capability[1]}"
        return ""

    def lacks_package(self, device: Device) -> str:
        """Why it cannot be loaded; empty where it can."""
        if device.cudnn < self.least_cudnn:
            return f"{self.name} needs version {self.least_cudnn}, and torch has {device.cudnn or 'none'}"
        if self.package is None:
            return ""
        name = self.package.distribution
        version = device.installed.get(name)
        if version is None:
            return f"{name} is not installed"
        try:
            is_older = Version(version) < Version(self.package.least)
        except InvalidVersion:
            is_older = False
        if is_older:
            return f"{name} {version} is older than {self.package.least}"
        return device.broken.get(name, "")

    def refuses(self, need: Need) -> str:
        """What of a need it does not do; empty where it does all."""
        for ask in need.asks:
            if ask not in self.takes:
                return f"takes no {WORDS[ask]}"
        if self.widest and need.width > self.widest:
            return f"takes heads up to {self.widest} wide, and these have {need.width}"
        if need.width % self.multiple:
            return f"takes heads whose width {self.multiple} divides, and these have {need.width}"
        return ""


_FLASH = ("packed", "window", "sinks", "lse")
_ALL = tuple(WORDS)
_FA3 = Package(
    "flash-attn-3", "3.0.0b1", "build flash-attn-3 from the folder hopper of github.com/Dao-AILab/flash-attention"
)
_FA4 = Package("flash-attn-4", "4.0.0b30", "pip install flash-attn-4")
"""Releases before b30 have no backward pass for heads of 72 or 80, which towers have."""

CUDNN = "cudnn"
TORCH_FLASH = "torch_flash"
NPU = "npu_fusion_attention"
EAGER = "eager"
KERNELS = (
    # On Hopper FA3 is before FA4, which has not closed the gap for rows of many documents.
    Kernel("flash_attention_3", _FLASH, ("cuda",), (9,), _FA3, widest=256, multiple=8, of_torch="FA3"),
    Kernel("flash_attention_4", _FLASH, ("cuda",), (9, 10), _FA4, widest=128, multiple=8, of_torch="FA4"),
    # An older cuDNN computes wrong numbers for lengths that 128 does not divide.
    Kernel(CUDNN, ("mask", "dropout"), ("cuda",), (9, 10), widest=128, multiple=8, least_cudnn=91501),
    Kernel(TORCH_FLASH, _FLASH, ("cuda",), (0, *range(8, 100)), widest=256),
    Kernel(NPU, ("packed", "window", "mask", "dropout"), ("npu",)),
    Kernel("sdpa", ("packed", "window", "sinks", "mask", "dropout", "fp32", "two widths")),
    Kernel("flex_attention", ("window", "sinks", "softcap", "mask", "fp32"), ("cuda",)),
    Kernel("npu_parts", ("lse", "fp32"), ("npu",)),
    Kernel("cpu_parts", ("lse", "key mask", "fp32"), ("cpu",)),
    Kernel(EAGER, _ALL),
)
"""The fastest first: the first that a device runs and that does what is needed is taken. `torch_flash` is the flash
kernel that torch brings, FA2; `sdpa` is all that torch's own function finds for a call; `…_parts` are the entries of a
device's kernel that compute a part of a spread sequence."""
BY_NAME = {kernel.name: kernel for kernel in KERNELS}
OF_PACKAGES = ("flash_attention_2", *(kernel.name for kernel in KERNELS if kernel.package is not None))
"""Kernels that can be asked for, and that no CPU has."""
FA2 = "flash-attn"
"""Never chosen, only asked for: torch brings its kernel."""
PACKAGES = (*(kernel.package.distribution for kernel in KERNELS if kernel.package is not None), FA2)


class KernelChoice(NamedTuple):
    """A kernel, and why it was taken."""

    kernel: Kernel
    reason: str
    """In words; empty where the device has one kernel only."""
    install: str = ""
    """What would bring a faster one, in words; empty where nothing would."""


def choose_kernel(need: Need, device: Device) -> KernelChoice:
    """The fastest kernel that does what is needed, with the reason and what would bring a faster one."""
    passed: dict[str, str] = {}
    faster: list[str] = []
    for kernel in KERNELS:
        if kernel.lacks_device(device):
            continue
        lacks = kernel.lacks_package(device)
        refuses = kernel.refuses(need)
        if not lacks and not refuses:
            install = f"{', or '.join(faster)}: faster here than {kernel.name}" if faster else ""
            return KernelChoice(kernel, _why_passed(kernel, device, passed), install)
        if not refuses and kernel.package is not None:
            faster.append(kernel.package.install)
        if not lacks or not refuses:
            passed.setdefault(refuses or lacks, f"{kernel.name} {refuses}" if refuses else lacks)
    raise AssertionError("the last kernel takes everything everywhere")


def _why_passed(kernel: Kernel, device: Device, passed: Mapping[str, str]) -> str:
    if kernel.package is not None:
        return f"{kernel.package.distribution} {device.installed[kernel.package.distribution]} is installed"
    return "; ".join(passed.values())
