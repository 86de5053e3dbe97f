"""What our stage relies on in `torch.distributed.pipelining`, in every torch that is allowed: that schedules call the
methods that it overrides, and keep what they make where it looks for it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules, stage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.torch_version import TorchVersion

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.distributed.pipeline.plan import check_schedule, is_schedule_right
from mindspeed_mm.fsdp.distributed.pipeline.schedules import OwnShapes, run_schedule

BASE = inspect.getsource(stage._PipelineStageBase)


@pytest.mark.edge("F1")
def test_overridden_methods_exist_with_the_same_arguments() -> None:
    for method in (
        "get_fwd_recv_ops",
        "get_fwd_send_ops",
        "get_bwd_recv_ops",
        "get_bwd_send_ops",
        "get_local_bwd_output",
        "set_local_fwd_input",
        "set_local_bwd_input",
        "_retrieve_recv_activations",
        "_retrieve_recv_grads",
        "_get_init_p2p_neighbors_ops",
    ):
        ours, theirs = (inspect.signature(getattr(cls, method)).parameters for cls in (OwnShapes, PipelineStage))
        assert list(ours) == list(theirs), method
    for method in ("_prepare_forward_infra", "_prepare_backward_infra"):
        assert callable(getattr(PipelineStage, method))


def test_schedules_and_stages_call_what_is_overridden() -> None:
    source = inspect.getsource(schedules)
    for call in (
        ".get_fwd_recv_ops(",
        ".get_fwd_send_ops(",
        ".get_bwd_recv_ops(",
        ".get_bwd_send_ops(",
        ".get_local_bwd_output(",
        ".set_local_fwd_input(",
        ".set_local_bwd_input(",
        "._prepare_forward_infra(",
        "._prepare_backward_infra(",
    ):
        assert call in source, call
    assert "self._retrieve_recv_activations(fwd_chunk_id)" in BASE
    assert "self._retrieve_recv_grads(bwd_chunk_id)" in BASE


def test_outputs_and_gradients_lie_where_they_are_looked_for() -> None:
    assert "output_tuple, _ = self.fwd_cache[fwd_chunk_id]" in BASE
    assert "self.bwd_cache[bwd_chunk_id] = grads_input" in BASE


def test_the_schedules_reduce_gradients_once_and_do_not_scale_them() -> None:
    for name in ("Schedule1F1B", "ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"):
        assert "scale_grads" in inspect.signature(getattr(schedules, name).__init__).parameters
    assert "set_requires_gradient_sync(False)" in inspect.getsource(PipelineStage.backward_maybe_with_nosync)
    assert "post_backward()" in inspect.getsource(PipelineStage.perform_reduce_grad)


@pytest.mark.edge("F1")
def test_what_is_imported_with_the_trainer() -> None:
    """Private names of pipelining differ between releases: a missing one must not keep runs from starting that have no
    stages."""
    program = (
        "import torch.distributed.pipelining._utils as names\n"
        "for name in ('_derive_grad_metas', '_make_tensor_from_meta', 'extract_tensor_metas'):\n"
        "    vars(names).pop(name, None)\n"
        "import mindspeed_mm.fsdp.train.trainer, sys; print(*sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    train = "mindspeed_mm.fsdp.train."
    only_where_asked_for = {f"{train}posttrain", f"{train}rollouts", f"{train}hooks.evaluation", "jiwer"}
    assert f"{train}hooks.build" in done.stdout.split()
    assert not only_where_asked_for & set(done.stdout.split())  # a plain run starts without them


class UsedTwice(nn.Module):
    """One weight, in front of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.tanh(self.inner(x)))


def in_two_parts(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of Σ y², as a schedule that splits backward passes computes them."""
    weights = list(model.parameters())
    _, groups = stage_backward_input([model(x).square().sum()], None, [x], iter(weights))
    stage_backward_weight(iter(weights), groups)
    return [weight.grad for weight in weights if weight.grad is not None]


def test_zbv_is_for_releases_whose_backward_passes_in_two_parts_are_right() -> None:
    torch.manual_seed(0)
    model, x = UsedTwice().double(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    found = in_two_parts(model, x)
    is_right = all(torch.allclose(a, b) for a, b in zip(expected, found, strict=True))
    assert is_right == is_schedule_right("zbv")


@pytest.mark.parametrize(
    ("release", "schedule", "is_right"),
    [("2.11.0+cu130", "zbv", False), ("2.13.0+cpu", "zbv", True), ("2.20.0", "zbv", True), ("2.11.0", "1f1b", True)],
)
def test_a_schedule_is_refused_where_torch_has_it_wrong(
    release: str, schedule: str, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(release))
    assert is_schedule_right(schedule) == is_right
    if is_right:
        check_schedule(schedule)
    else:
        with pytest.raises(MachineError, match=r"'zbv' needs torch 2.13, and 2.11.0.cu130 is installed"):
            check_schedule(schedule)


def test_what_a_stage_refuses_is_told_as_it_refused_it() -> None:
    class Refusing:
        def step(self, **_: object) -> None:
            raise RuntimeError("[Stage 1] failed to run forward") from ConfigError("has no loss", key="a.b")

    class Failing:
        def step(self, **_: object) -> None:
            raise RuntimeError("a bug")

    stages: Any = [SimpleNamespace(is_last=True)]
    with pytest.raises(ConfigError, match="has no loss"):
        run_schedule(cast("Any", Refusing()), stages, 2)
    with pytest.raises(RuntimeError, match="a bug"):
        run_schedule(cast("Any", Failing()), stages, 2)
