"""The door to an accelerator, by stand-ins: what is switched on for determinism, and how tensors are sent."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.utils import device
from mindspeed_mm.fsdp.utils.device import copied_to, deterministic_kernels, device_capability, npu_operator


def flags() -> tuple[bool, bool, bool, str | None]:
    cudnn = torch.backends.cudnn
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled, cudnn.deterministic, cudnn.benchmark, os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def test_determinism_is_complete_on_cuda_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "get_device_type", lambda: "cuda")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = flags()
    with deterministic_kernels():
        assert flags() == (True, True, False, ":4096:8")
        assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"
    assert flags() == before
    assert "FLASH_ATTENTION_DETERMINISTIC" not in os.environ


def test_determinism_on_an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "get_device_type", lambda: "npu")
    monkeypatch.setenv("LCCL_DETERMINISTIC", "0")  # what a person sets stays
    with deterministic_kernels():
        assert torch.are_deterministic_algorithms_enabled()
        assert (os.environ["HCCL_DETERMINISTIC"], os.environ["LCCL_DETERMINISTIC"]) == ("true", "0")
    assert "HCCL_DETERMINISTIC" not in os.environ


def test_a_workspace_that_is_not_deterministic_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "get_device_type", lambda: "cuda")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(MachineError, match="CUBLAS_WORKSPACE_CONFIG=:0:0") as caught, deterministic_kernels():
        pass
    assert caught.value.problems[0].key == "training.use_deter_comp"


class Sent:
    """A tensor that notes what is done with it."""

    def __init__(self, size_bytes: int, is_pinned: bool = False, where: str = "cpu") -> None:
        self.device = torch.device(where)
        self.nbytes, self._pinned, self.calls = size_bytes, is_pinned, []

    def is_pinned(self) -> bool:
        return self._pinned

    def pin_memory(self) -> Sent:
        self.calls.append("pin")
        return self

    def to(self, where: torch.device, *, non_blocking: bool = False) -> Sent:
        self.calls.append((where.type, non_blocking))
        return self


@pytest.mark.parametrize(
    ("tensor", "calls"),
    [
        (Sent(8), ["pin", ("cuda", True)]),
        (Sent(8, is_pinned=True), [("cuda", True)]),
        (Sent(2**30), [("cuda", True)]),
        (Sent(8, where="cuda"), [("cuda", True)]),
    ],
    ids=["made on the way", "pinned by the loader", "large", "on a device"],
)
def test_tensors_are_sent_from_locked_memory_and_nobody_waits(tensor: Any, calls: list[Any]) -> None:
    copied_to(tensor, torch.device("cuda"))
    assert tensor.calls == calls


@pytest.mark.edge("D3")
def test_a_tensor_that_comes_to_the_host_has_arrived() -> None:
    tensor: Any = Sent(8, where="cuda")
    copied_to(tensor, torch.device("cpu"))
    assert tensor.calls == [("cpu", False)]


def test_a_cpu_has_no_capability_and_no_operators_of_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_capability() == (0, 0)
    with pytest.raises(MachineError, match="npu_swiglu"):
        npu_operator("npu_swiglu", key="features.fused_kernels")
    monkeypatch.setattr(device, "get_device_type", lambda: "npu")
    library = SimpleNamespace(npu_swiglu=len)
    monkeypatch.setattr(device.importlib, "import_module", lambda name: {"torch_npu": library}[name])
    assert npu_operator("npu_swiglu", key="") is len
    with pytest.raises(MachineError, match="npu_rope"):
        npu_operator("npu_rope", key="")
