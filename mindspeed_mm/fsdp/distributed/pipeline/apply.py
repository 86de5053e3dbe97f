"""Pipeline parallelism: a model's layers are spread over ranks, which hand hidden states on.

The steps stand in `fsdp/plan/apply.py`: `split_into_stages` leaves of the model what this rank has; tensor and context
parallelism and recompute are applied to that part; `Pipeline.build_stages` makes of it one runnable model a stage,
which are sharded one by one. The part keeps the names of the whole: optimizer, norm, averages and checkpoints see it.

Of a weight that the first and the last stage share (embedding and output head), each has a copy, and the two stay equal
to the bit, since both are updated by the same sum of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.distributed.parallel_state import ParallelState
from mindspeed_mm.fsdp.distributed.pipeline.carried import Boundary
from mindspeed_mm.fsdp.distributed.pipeline.cut import cut_to_rank, stage_owners
from mindspeed_mm.fsdp.distributed.pipeline.plan import StagePlan, check_schedule, plan_stages
from mindspeed_mm.fsdp.distributed.pipeline.stage import StageModule
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import own_sharding
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.structure.stages import KEY, RouterPassing, Share, find_cut_points, meta_copy
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.fsdp.utils.model_parts import shared_parameters


class Pipeline:
    """The stages of this rank and what holds them together.

    Args:
        part: What this rank holds of the model.
        share: What is known of the rest.
        plan: The stages of all ranks.
        parallel: The section.
    """

    def __init__(self, part: nn.Module, share: Share, plan: StagePlan, parallel: ParallelArguments) -> None:
        self.part, self.share, self.plan = part, share, plan
        self._parallel = parallel
        assert share.group is not None
        self.group: dist.ProcessGroup = share.group
        self.rank = dist.get_rank(self.group)
        self.dtype = hidden_dtype(share.whole, parallel)
        self.boundary = Boundary(share.whole, plan, self.dtype)
        self.stages: list[StageModule] = []
        self._ends: TiedEnds | None = None

    def build_stages(self, media: Sequence[str], *, casts_inputs: bool, router_numbers: int = 0) -> None:
        """Make the stages, when everything but sharding has been applied to the part.

        Args:
            media: Batch keys that feed towers.
            casts_inputs: Give the model its floating-point arguments in `param_dtype`.
            router_numbers: How many numbers a term over the routers of all stages needs of each; 0: there is none.
        """
        if router_numbers:
            passing = RouterPassing(router_numbers, torch.promote_types(self.dtype, torch.float32))
            self.boundary.routers = passing
            facts_of(self.part).note(passing)
        for index in self.plan.stages_of(self.rank):
            stage = StageModule(self.part, self.plan, index, self.boundary, self.dtype, media)
            stage.cast_inputs(torch_dtype(self._parallel.fsdp_plan.param_dtype) if casts_inputs else None)
            self.stages.append(stage)
        self.share.stages.extend(self.stages)

    @property
    def first_model(self) -> nn.Module | None:
        """The model of the first stage, where this rank has it."""
        if self.stages[0].is_first:
            return self.stages[0].model
        return None

    def equalise(self) -> None:
        """Let copies of shared weights have the values of the weights, which were just loaded."""
        ties = ties_between_stages(self.share.whole, self.plan)
        if ties:
            copy_rank = self.plan.rank_of(self.plan.stages - 1)
            self._ends = TiedEnds(self.part, self.share, ties, copy_rank)
            self._ends.copy_values()

    def sum_tied_gradients(self) -> None:
        """Once a step, when the stages have reduced their own gradients."""
        if self._ends is not None:
            self._ends.sum_gradients()

    def counted_parameters(self) -> list[nn.Parameter]:
        """This rank's parameters for a norm: of a weight with two copies one stage gives it."""
        return [parameter for name, parameter in self.part.named_parameters() if name not in self.share.copies]


def resolve_stages(model: nn.Module, parallel: ParallelArguments) -> StagePlan | None:
    """The stages of a whole model, with adapters; None where it is not cut. Pure.

    Raises:
        ConfigError: The model cannot be cut as the plan says.
        MachineError: The installed torch computes the schedule wrong.
    """
    if parallel.pipeline_parallel_size == 1:
        return None
    check_composition(model, parallel)
    return plan_stages(model, find_cut_points(model), parallel.pipeline_parallel_size, parallel.pp_plan)


def split_into_stages(model: nn.Module, plan: StagePlan, parallel: ParallelArguments, state: ParallelState) -> Pipeline:
    """Leave of a model what this rank has, in place. Every rank calls it.

    Args:
        model: Built, with adapters, ties live; nothing else was applied to it.
        plan: From `resolve_stages`.
        parallel: The section.
        state: Its pipeline axis.
    """
    whole = meta_copy(model)
    copies = cut_to_rank(model, plan, state.axis_rank("pp"), hidden_dtype(whole, parallel))
    share = Share(whole, stage_owners(whole, plan), state.axis_group("pp"), copies)
    facts_of(model).share = share
    return Pipeline(model, share, plan, parallel)


def hidden_dtype(model: nn.Module, parallel: ParallelArguments) -> torch.dtype:
    """What passes between stages: the type that blocks compute in."""
    return torch_dtype(parallel.fsdp_plan.param_dtype) or next(model.parameters()).dtype


def check_composition(model: nn.Module, parallel: ParallelArguments) -> None:
    """What speaks against stages of this model with this torch; what the configuration alone shows is in
    `params/rules/plan.py`.

    Raises:
        ConfigError: The model does not go together with stages.
        MachineError: The installed torch computes the schedule wrong.
    """
    check_schedule(parallel.pp_plan.schedule)
    is_spread = parallel.ring_attention_size * parallel.ulysses_parallel_size > 1
    if is_spread and facts_of(model).kind.spreads_samples:
        raise ConfigError(
            "a generator's samples cannot be spread over ranks as well: several are under way at a time",
            key=f"{KEY} · parallel.ring_attention_size · parallel.ulysses_parallel_size",
            way_out="Set one of them to 1.",
        )
    if own_sharding(model) is not None:
        raise ConfigError(
            f"{type(model).__name__} shards itself, and stages of a pipeline are sharded one by one",
            key=KEY,
            way_out="Set it to 1; or leave that to fsdp_plan.apply_modules, and the model without code for it.",
        )


def ties_between_stages(whole: nn.Module, plan: StagePlan) -> dict[str, str]:
    """Copy → first name, of weights whose ends stand on different stages."""
    ties = {}
    for first, *others in shared_parameters(whole):
        for other in others:
            if plan.owner(other) != plan.owner(first):
                ties[other] = first
    return ties


# --- weights that the first and the last stage share ------------------------------------------------------------------


class TiedEnds:
    """The shared weights of which this rank has an end.

    Args:
        part: What this rank holds of the model, sharded.
        share: Names the copies.
        ties: Copy → first name, of the whole model, the same on all ranks.
        copy_rank: Pipeline rank of the copies.
    """

    def __init__(self, part: nn.Module, share: Share, ties: Mapping[str, str], copy_rank: int) -> None:
        self._share = share
        parameters = dict(part.named_parameters())
        self._ends = [
            (parameters.get(first), parameters.get(copy), share.owners[first], copy_rank)
            for copy, first in sorted(ties.items())
            if first in parameters or copy in parameters
        ]

    @torch.no_grad()
    def copy_values(self) -> None:
        """Give the copies the values of the weights."""
        for first, copy, first_rank, copy_rank in self._ends:
            if first is not None and copy is not None:
                _local(copy).copy_(_local(first))
            elif first is not None:
                dist.send(_local(first).contiguous(), group=self._share.group, group_dst=copy_rank)
            elif copy is not None:
                values = torch.empty_like(_local(copy))
                dist.recv(values, group=self._share.group, group_src=first_rank)
                _local(copy).copy_(values)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Let both ends have the sum of their gradients, once a step."""
        for first, copy, first_rank, copy_rank in self._ends:
            if first is not None and copy is not None:
                if first.requires_grad:
                    total = _gradient(first) + _gradient(copy)
                    for end in (first, copy):
                        _gradient(end).copy_(total)
                continue
            own, other = (first, copy_rank) if first is not None else (copy, first_rank)
            assert own is not None
            if own.requires_grad:
                gradient = _gradient(own)
                gradient.add_(self._exchanged(gradient, other))

    def _exchanged(self, gradient: Tensor, other: int) -> Tensor:
        theirs, ours = torch.empty_like(gradient), gradient.contiguous()
        group = self._share.group
        operations = [
            dist.P2POp(dist.isend, ours, group=group, group_peer=other),
            dist.P2POp(dist.irecv, theirs, group=group, group_peer=other),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        return theirs


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, for writing in place; zeros where no micro-batch made one."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return _local(parameter.grad)


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor.detach()
