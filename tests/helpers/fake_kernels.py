"""An attention kernel of a package that is not there, found and put into force as the real one would be.

The package has metadata alone; torch's register of flash attention gets a kernel of its name that takes the place of
the CPU's flash kernel, as FA3's takes the place of CUDA's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.library import Library
from torch.nn import attention as of_torch

from mindspeed_mm.fsdp.ops import kernels_in_force
from mindspeed_mm.fsdp.ops.kernels_in_force import IN_FORCE, KernelsInForce

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def pretend_device(monkeypatch: pytest.MonkeyPatch, kind: str, capability: tuple[int, int] = (0, 0)) -> None:
    """The choice of kernels finds this device; tensors stay on the CPU."""
    monkeypatch.setattr(kernels_in_force, "get_device_type", lambda: kind)
    monkeypatch.setattr(kernels_in_force, "device_capability", lambda: capability)


def pretend_installed(monkeypatch: pytest.MonkeyPatch, folder: Path, distribution: str, version: str) -> None:
    """A distribution that is installed and cannot be imported."""
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(folder)


@contextmanager
def fresh_process() -> Iterator[None]:
    """Nothing is in force at first; afterwards, what was before."""
    with mock.patch.dict(vars(IN_FORCE), vars(KernelsInForce())):
        try:
            yield
        finally:
            vars(IN_FORCE)["_order"].close()
            if of_torch.current_flash_attention_impl() is not None:
                of_torch.restore_flash_attention_impl()


@contextmanager
def registered(name: str, attend: Attend | None) -> Iterator[None]:
    """torch's register has this kernel under that name; None: one that does not load.

    Args:
        name: As `FA3`.
        attend: Takes what the CPU's flash operator takes; answers output and log-sum-exp.
    """

    class Handle:
        def __init__(self, library: Library) -> None:
            self.library: Library | None = library

        def remove(self) -> None:
            assert self.library is not None
            self.library._destroy()
            self.library = None

    def activate() -> Handle:
        if attend is None:
            raise ImportError("undefined symbol")
        library = Library("aten", "IMPL")
        library.impl("_scaled_dot_product_flash_attention_for_cpu", attend, "CPU", allow_override=True)
        return Handle(library)

    register: Any = of_torch._registry
    with mock.patch.dict(register._FLASH_ATTENTION_IMPLS, {name: activate}):
        yield


def wrong_numbers(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel that answers ones."""
    return torch.ones(*q.shape[:3], v.shape[3], dtype=q.dtype), torch.zeros(q.shape[:3])
