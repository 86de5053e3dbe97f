"""The private names of `torch.distributed.pipelining` that our stage relies on, and that its overrides are called."""

from __future__ import annotations

import inspect

import torch
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining import _utils as names

from mindspeed_mm.fsdp.distributed.pipeline_torch import OwnShapes


def test_overridden_methods_exist_with_the_same_arguments() -> None:
    for method in ("_setup_forward_recv_info", "_setup_backward_recv_info", "get_bwd_send_ops"):
        ours, theirs = (inspect.signature(getattr(cls, method)).parameters for cls in (OwnShapes, PipelineStage))
        assert list(ours) == list(theirs), method


def test_shapes_that_were_stated_spare_the_inference_pass() -> None:
    source = inspect.getsource(PipelineStage._prepare_forward_infra)
    assert "self._stage_meta.inputs = self._user_meta.inputs" in source
    assert "self._setup_forward_recv_info(num_microbatches, has_backward)" in source
    assert "self._setup_backward_recv_info(num_microbatches)" in inspect.getsource(
        PipelineStage._prepare_backward_infra
    )
    metas = names.extract_tensor_metas((torch.empty(2, device="meta", requires_grad=True),))
    assert metas is not None
    whole = names._StageMeta(inputs=metas, outputs=metas)
    nothing_enters = names._StageMeta(inputs=(), outputs=metas)
    for meta in (whole, nothing_enters):
        assert not names.InferenceMode.needs_dynamic(meta, True)


def test_gradients_are_derived_from_what_was_sent() -> None:
    metas = names.extract_tensor_metas((torch.empty(3, 4, dtype=torch.float64, device="meta", requires_grad=True),))
    assert metas is not None
    (gradient,) = names._derive_grad_metas(metas)
    assert gradient is not None
    made = names._make_tensor_from_meta(gradient, torch.device("cpu"))
    assert (made.shape, made.dtype) == ((3, 4), torch.float64)


def test_the_schedules_reduce_gradients_once_and_do_not_scale_them() -> None:
    for name in ("Schedule1F1B", "ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"):
        assert "scale_grads" in inspect.signature(getattr(schedules, name).__init__).parameters
    assert "set_requires_gradient_sync(False)" in inspect.getsource(PipelineStage.backward_maybe_with_nosync)
    assert "post_backward()" in inspect.getsource(PipelineStage.perform_reduce_grad)
