"""The forward-backward strategy of a pipeline: the micro-batches of a step follow a schedule through the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.distributed.pipeline.apply import Pipeline
from mindspeed_mm.fsdp.distributed.pipeline.carried import Passed
from mindspeed_mm.fsdp.distributed.pipeline.schedules import OwnShapes, build_pipeline_schedule, run_schedule
from mindspeed_mm.fsdp.distributed.pipeline.stage import StageModule, StepWork
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import fsdp_modules
from mindspeed_mm.fsdp.loss.objectives import Objective, Terms
from mindspeed_mm.fsdp.params.parallel_args import PpPlan
from mindspeed_mm.fsdp.utils.ranges import PIPELINE, named


class PipelineForwardBackward:
    """Every rank of a pipeline has all micro-batches; tensors between stages are all that is sent.

    Args:
        pipeline: Its stages are sharded and have their weights.
        objective: What to sum; the last stage does.
        pp_plan: Schedule, and how many micro-batches are under way at a time.
        device: Where the stages are.
    """

    def __init__(self, pipeline: Pipeline, objective: Objective, pp_plan: PpPlan, device: torch.device) -> None:
        self._pipeline, self._objective, self._plan = pipeline, objective, pp_plan
        self._device = device
        self._stages = [
            OwnShapes(stage, stage.index, pipeline.plan, device, pipeline.group) for stage in pipeline.stages
        ]
        self._schedules: dict[int, Any] = {}
        self._waiting: dict[tuple[int, int], list[torch.Tensor]] = {}

    def __call__(self, micro_batches: Sequence[Batch], denominators: Mapping[str, float]) -> Terms:
        """Accumulate gradients of Σ terms / denominators; returns this data rank's share of each normalised term, the
        same on all its stages."""
        work = StepWork(self._objective, micro_batches, denominators)
        at_a_time = self._plan.micro_batches or len(micro_batches)
        for start in range(0, len(micro_batches), at_a_time):
            work.batches = micro_batches[start : start + at_a_time]
            self._run(work)
        self._pipeline.sum_tied_gradients()
        return self._on_all_stages(work, denominators)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch]) -> Terms:
        """Each term's sum over micro-batches, on all stages: forward passes, one micro-batch behind the other."""
        names = self._objective.count(micro_batches)
        work = StepWork(self._objective, micro_batches, dict.fromkeys(names, 1))
        work.crossings = self._crossings(work)
        for number in range(len(micro_batches)):
            for stage in self._pipeline.stages:
                self._forward(stage, work, number)
        for stage in self._pipeline.stages:
            for module in fsdp_modules(stage):
                # A backward pass would have cut the parameters again.
                module.reshard()
        return self._on_all_stages(work, names)

    def _run(self, work: StepWork) -> None:
        count = len(work.batches)
        work.crossings = self._crossings(work)
        for stage, module in zip(self._stages, self._pipeline.stages, strict=True):
            module.work = work
            before: list[list[Passed]] = []
            after: list[list[Passed]] = []
            for entering in work.crossings:
                before.append(entering[module.index])
                after.append([] if module.is_last else entering[module.index + 1])
            stage.lay_out(before, after)
        if count not in self._schedules:
            self._schedules[count] = build_pipeline_schedule(self._plan.schedule, self._stages, count)
        with named(PIPELINE):
            run_schedule(self._schedules[count], self._stages, count)
        for module in self._pipeline.stages:
            module.work = None

    def _crossings(self, work: StepWork) -> list[list[list[Passed]]]:
        return [self._pipeline.boundary.crossings(work.objective, batch) for batch in work.batches]

    def _forward(self, stage: StageModule, work: StepWork, number: int) -> None:
        plan, group = self._pipeline.plan, self._pipeline.group
        entering = work.crossings[number][stage.index]
        received = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in entering]
        for tensor in received:
            self._pass_on(tensor, plan.rank_of(stage.index - 1), group, sends=False, key=(number, stage.index))
        stage.work = work
        sent = stage(*received, mb=torch.tensor([number]))
        stage.work = None
        if stage.is_last:
            return
        for tensor in sent:
            self._pass_on(tensor, plan.rank_of(stage.index + 1), group, sends=True, key=(number, stage.index + 1))

    def _pass_on(
        self, tensor: torch.Tensor, peer: int, group: dist.ProcessGroup, *, sends: bool, key: tuple[int, int]
    ) -> None:
        """Send to, or receive from, another stage; two stages of one rank hand over in memory."""
        if peer == self._pipeline.rank:
            waiting = self._waiting.setdefault(key, [])
            if sends:
                waiting.append(tensor)
            else:
                tensor.copy_(waiting.pop(0))
        elif sends:
            dist.send(tensor.contiguous(), group=group, group_dst=peer)
        else:
            dist.recv(tensor, group=group, group_src=peer)

    def _on_all_stages(self, work: StepWork, names: Mapping[str, float]) -> Terms:
        """What the last stage summed, everywhere."""
        dtype = torch.float64 if self._pipeline.dtype == torch.float64 else torch.float32
        zero = torch.zeros((), dtype=dtype, device=self._device)
        # Stages in front of the last one have no totals and add zeros.
        numbers = torch.stack([work.totals.get(name, zero).to(dtype) for name in sorted(names)])
        dist.all_reduce(numbers, group=self._pipeline.group)
        return dict(zip(sorted(names), numbers, strict=True))
