"""What our stage relies on in `torch.distributed.pipelining`, in every torch that is allowed: that schedules call the
methods that it overrides, and keep what they make where it looks for it."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from torch.distributed.pipelining import PipelineStage, schedules, stage

from mindspeed_mm.fsdp.distributed.pipeline_torch import OwnShapes

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
def test_no_private_name_of_pipelining_is_imported_with_the_trainer() -> None:
    """They differ between releases: a missing one must not keep runs from starting that have no stages."""
    program = (
        "import torch.distributed.pipelining._utils as names\n"
        "for name in ('_derive_grad_metas', '_make_tensor_from_meta', 'extract_tensor_metas'):\n"
        "    vars(names).pop(name, None)\n"
        "import mindspeed_mm.fsdp.train.trainer\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
