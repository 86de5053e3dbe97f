"""What is taken from `torch.distributed.pipelining`: schedules, and a stage whose micro-batches differ in shape.

torch's stage has one shape for all micro-batches, found by an extra pass or stated once. `OwnShapes` has buffers of its
own for every micro-batch, whose shapes are stated before the step: no communication, no padding. What it overrides is
what schedules call in every torch from 2.11 on (`tests/fsdp/distributed/test_pipeline_torch.py` pins it); how a stage
describes its tensors differs between releases and is not used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.distributed.pipeline.carried import Passed
from mindspeed_mm.fsdp.distributed.pipeline.plan import StagePlan

Tensors = tuple[Tensor, ...]

_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI = {"interleaved1f1b": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble}


class OwnShapes(PipelineStage):
    """A stage with shapes for each micro-batch.

    Args:
        module: What runs.
        index: Of the stage.
        plan: Which rank has which stage.
        device: Of the tensors received.
        group: The ranks of the pipeline.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        plan: StagePlan,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        nothing = torch.empty(0, device="meta")
        super().__init__(module, index, plan.stages, device, input_args=(nothing,), output_args=(nothing,), group=group)
        self.stage_index_to_group_rank = {stage: plan.rank_of(stage) for stage in range(plan.stages)}
        self.args_recv_info = {0: ()}  # torch 2.13 looks whether stages skip one
        self._received: list[Tensors] = []
        self._gradients: list[Tensors] = []

    def lay_out(self, inputs: Sequence[Sequence[Passed]], outputs: Sequence[Sequence[Passed]]) -> None:
        """State what enters and leaves, for each micro-batch of the step to come."""
        self.chunks = len(inputs)
        self._received = [self._empty(tensors) for tensors in inputs]
        self._gradients = [self._empty(tensors) for tensors in outputs]
        if hasattr(self, "_stage_meta"):  # torch 2.13 counts the arguments in front of the keywords with it
            self._stage_meta.inputs = self._received[0]

    def _empty(self, tensors: Sequence[Passed]) -> Tensors:
        return tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in tensors)

    # --- what torch would infer and compare, and is stated here ---

    def _prepare_forward_infra(self, *args: object, **kwargs: object) -> None:
        return None

    def _prepare_backward_infra(self, *args: object, **kwargs: object) -> None:
        return None

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing was inferred; torch would drop the gradients of earlier micro-batches."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """First messages between neighbours, in torch 2.11; gloo has no way from a rank to itself."""
        return [each for each in super()._get_init_p2p_neighbors_ops() if each.group_peer != self.group_rank]

    def _validate_fwd_input(self, args: object, kwargs: object) -> None:
        """One shape for all, in torch 2.11."""

    def _validate_fwd_outputs(self, outputs: object) -> None:
        """One shape for all, in torch 2.11."""

    # --- tensors that pass between two stages ---

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What comes from the stage before."""
        if self.is_first:
            return []
        return self._operations(dist.irecv, self._received[fwd_chunk_id], -1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What goes to the stage behind."""
        if self.is_last:
            return []
        # What is sent is the value alone; the graph stays here for the backward pass.
        outputs, _ = self.fwd_cache[fwd_chunk_id]
        return self._operations(dist.isend, [output.detach() for output in outputs], 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Gradients of what went to the stage behind."""
        if not self.has_backward:
            return []
        return self._operations(dist.irecv, self._gradients[bwd_chunk_id], 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Gradients of what came from the stage before."""
        if not self.has_backward or self.is_first:
            return []
        return self._operations(dist.isend, self.get_local_bwd_output(bwd_chunk_id), -1)

    def _operations(self, kind: Callable[..., object], tensors: Sequence[Tensor], step: int) -> list[dist.P2POp]:
        peer = self.stage_index_to_group_rank.get(self.stage_index + step)
        return [dist.P2POp(kind, each, group=self.group, group_peer=peer) for each in tensors]

    def get_local_bwd_output(self, mb_index: int) -> Tensors:
        """Gradients of what came from the stage before; zeros for tensors that this stage did not use."""
        received = self._received[mb_index]
        gradients = self.bwd_cache.pop(mb_index)[: len(received)]  # behind them are those of keyword arguments
        sent = []
        for tensor, gradient in zip(received, gradients, strict=True):
            sent.append(torch.zeros_like(tensor) if gradient is None else gradient.contiguous())
        return tuple(sent)

    def set_local_fwd_input(self, prev_stage_outputs: Tensor | Tensors, mb_index: int) -> None:
        """What comes from a stage of the same rank."""
        outputs = (prev_stage_outputs,) if isinstance(prev_stage_outputs, Tensor) else prev_stage_outputs
        self._received[mb_index] = tuple(output.detach() for output in outputs)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Gradients that come from a stage of the same rank (`get_local_bwd_output`)."""
        self._gradients[mb_index] = cast(Tensors, next_stage_bwd_outputs)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Tensors:
        return tuple(each.requires_grad_(self.has_backward) for each in self._received[fwd_chunk_id])

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Tensors:
        return self._gradients[bwd_chunk_id]


def build_pipeline_schedule(
    name: str, stages: Sequence[OwnShapes], micro_batches: int
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    """The schedule of a step with so many micro-batches; the last stage returns the loss itself."""
    if name in _SINGLE:
        # Not scaled: each micro-batch's loss has the denominator of the whole step already.
        return _SINGLE[name](stages[0], micro_batches, loss_fn=_itself, scale_grads=False)
    return _MULTI[name](list(stages), micro_batches, loss_fn=_itself, scale_grads=False)


def work_of_rank(name: str, plan: StagePlan, rank: int, micro_batches: int) -> list[tuple[str, int, int]]:
    """What a rank computes in a step, in order, and as the schedule itself would do it; nothing runs.

    Args:
        name: Of the schedule.
        plan: Which rank has which stage.
        rank: Of the pipeline.
        micro_batches: Of the step.

    Returns:
        (`F` forward, `B` backward, `I` gradients of inputs or `W` gradients of weights; stage; micro-batch).
    """
    if name in _SINGLE:
        # 1F1B: as many forward passes ahead as there are stages from here to the end, which the first gradient crosses.
        most_ahead = plan.ranks - rank
        if name == "gpipe":
            most_ahead = micro_batches
        return _work_of_single_stage(rank, micro_batches, most_ahead)
    ranks = {"num_stages": plan.stages, "group_size": plan.ranks, "group_rank": rank}
    described: Any = [SimpleNamespace(**ranks, stage_index=n, submod=nn.Identity()) for n in plan.stages_of(rank)]
    schedule = _MULTI[name](described, micro_batches, loss_fn=_itself, scale_grads=False)
    work = []
    for action in schedule.pipeline_order_with_comms[rank]:
        computed = re.fullmatch(r"(\d+)([FBIW])(\d+)", str(action))  # 2F0: stage, kind, micro-batch; not communication
        if computed is not None:
            work.append((computed[2], int(computed[1]), int(computed[3])))
    return work


def _work_of_single_stage(stage: int, micro_batches: int, most_ahead: int) -> list[tuple[str, int, int]]:
    """Forward passes up to `most_ahead`, then a backward and a forward pass in turn, then the backward passes left."""
    ahead = min(micro_batches, most_ahead)
    work = [("F", stage, number) for number in range(ahead)]
    for number in range(micro_batches):
        work.append(("B", stage, number))
        if number + ahead < micro_batches:
            work.append(("F", stage, number + ahead))
    return work


def run_schedule(
    schedule: PipelineScheduleSingle | PipelineScheduleMulti, stages: Sequence[OwnShapes], micro_batches: int
) -> None:
    """Forward and backward of all micro-batches; stages get the number of each.

    Raises:
        MMError: What a stage refused, which torch wraps in an error of its own.
    """
    # torch cuts what it is given into micro-batches: of this each gets one number.
    numbers = torch.arange(micro_batches)
    try:
        if any(stage.is_last for stage in stages):
            schedule.step(mb=numbers, target=numbers, losses=[], return_outputs=False)
        else:
            schedule.step(mb=numbers, return_outputs=False)
    except RuntimeError as error:
        # The refusal itself says which key to change; torch's message names a stage and a micro-batch.
        if isinstance(error.__cause__, MMError):
            raise error.__cause__ from error
        raise


def _itself(output: Tensor, _target: object) -> Tensor:
    return output
