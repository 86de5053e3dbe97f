"""What is taken from `torch.distributed.pipelining`: schedules, and a stage whose micro-batches differ in shape.

torch's stage has one shape for all micro-batches, found by an extra pass or stated once. `OwnShapes` overrides three of
its methods so that each micro-batch has its own, stated before the step: no communication, no padding. It relies on
private names, which hold for torch 2.13 (`tests/fsdp/distributed/test_pipeline_torch.py` pins them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _derive_grad_metas, _make_tensor_from_meta, extract_tensor_metas
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.stage import _RecvInfo

from mindspeed_mm.fsdp.distributed.pipeline_plan import StagePlan

Shapes = Sequence[tuple[int, ...]]
"""Of the tensors that pass between two stages."""

_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI = {"interleaved1f1b": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble}


class OwnShapes(PipelineStage):
    """A stage with shapes for each micro-batch.

    Args:
        module: What runs.
        index: Of the stage.
        plan: Which rank has which stage.
        device: Of the tensors received.
        dtype: Of what passes between stages.
        group: The ranks of the pipeline.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        plan: StagePlan,
        device: torch.device,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
    ) -> None:
        nothing = torch.empty(0, device="meta")
        super().__init__(module, index, plan.stages, device, input_args=(nothing,), output_args=(nothing,), group=group)
        self.stage_index_to_group_rank = {stage: plan.rank_of(stage) for stage in range(plan.stages)}
        self._dtype = dtype
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def lay_out(self, inputs: Sequence[Shapes], outputs: Sequence[Shapes]) -> None:
        """State what enters and leaves, for each micro-batch of the step to come."""
        self._inputs = [self._metas(shapes) for shapes in inputs]
        self._outputs = [self._metas(shapes) for shapes in outputs]
        self._user_meta.inputs, self._user_meta.outputs = self._inputs[0], self._outputs[0]
        self._stage_meta.inputs, self._stage_meta.outputs = self._inputs[0], self._outputs[0]
        self.grad_send_info = None
        self._setup_forward_recv_info(len(inputs), True)
        self._setup_forward_send_info()
        self._setup_backward_recv_info(len(inputs))

    def _metas(self, shapes: Shapes) -> Any:
        tensors = [torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True) for shape in shapes]
        return extract_tensor_metas(tuple(tensors))

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        for chunk in range(num_microbatches):
            self.args_recv_info[chunk] = tuple(
                _RecvInfo(
                    f"recv_for_{self.stage_index}_{place}",
                    self.stage_index - 1,
                    _make_tensor_from_meta(meta, self.device),
                    meta,
                )
                for place, meta in enumerate(self._inputs[chunk])
            )

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        self.chunks = num_microbatches
        for chunk in range(num_microbatches):
            metas = () if self.is_last else _derive_grad_metas(self._outputs[chunk])
            self.grad_recv_info[chunk] = tuple(
                _RecvInfo(
                    f"recv_grad_for_{self.stage_index}_{place}",
                    self.stage_index + 1,
                    _make_tensor_from_meta(meta, self.device) if meta is not None else None,
                    meta,
                )
                for place, meta in enumerate(metas)
            )

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Zeros that stand for gradients nobody made have the shape of this micro-batch."""
        if self.has_backward and not self.is_first:
            self._stage_meta.input_grads = _derive_grad_metas(self._inputs[bwd_chunk_id])
        return super().get_bwd_send_ops(bwd_chunk_id)


def build_schedule(name: str, stages: Sequence[OwnShapes], micro_batches: int) -> Any:
    """The schedule of a step with so many micro-batches; the last stage returns the loss itself."""
    if name in _SINGLE:
        return _SINGLE[name](stages[0], micro_batches, loss_fn=_itself, scale_grads=False)
    return _MULTI[name](list(stages), micro_batches, loss_fn=_itself, scale_grads=False)


def run_schedule(schedule: Any, stages: Sequence[OwnShapes], micro_batches: int) -> None:
    """Forward and backward of all micro-batches, which the stages are told by their numbers."""
    numbers = torch.arange(micro_batches)
    if any(stage.is_last for stage in stages):
        schedule.step(mb=numbers, target=numbers, losses=[], return_outputs=False)
    else:
        schedule.step(mb=numbers, return_outputs=False)


def _itself(output: Tensor, _target: Any) -> Tensor:
    return output
