"""What will be done to a model: one value, resolved once, that training applies and everybody else reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mindspeed_mm.fsdp.distributed.parallel_plan import ParallelPlan
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import build_precision_policy
from mindspeed_mm.fsdp.distributed.towers.idle import NO_IDLE_TOWERS, IdlePlan
from mindspeed_mm.fsdp.features.feature_plan import FeaturePlan
from mindspeed_mm.fsdp.loss.build_head_loss import HeadPlan
from mindspeed_mm.fsdp.optimizer.groups import GroupPlan
from mindspeed_mm.fsdp.params.parallel_args import FsdpPlan


@dataclass(frozen=True)
class Precision:
    """The formats that a plan computes in; None: parameters are gathered and summed as they are stored."""

    compute: torch.dtype | None
    reduce: torch.dtype | None
    casts_inputs: bool
    """Whether floating-point inputs of wrapped modules are cast to `compute`."""

    @classmethod
    def of(cls, section: FsdpPlan) -> Precision:
        """What FSDP computes and reduces in under this `fsdp_plan`."""
        policy = build_precision_policy(section)
        return cls(policy.param_dtype, policy.reduce_dtype, policy.cast_forward_inputs)

    @property
    def name(self) -> str:
        """For people: bf16, fp32 …"""
        return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}.get(self.compute_dtype, "fp32")

    @property
    def compute_dtype(self) -> torch.dtype:
        """What products are computed in: masters are fp32 where nothing else is asked for."""
        return self.compute or torch.float32


@dataclass(frozen=True)
class ModelPlan:
    """Everything that the configuration does to a model."""

    parallel: ParallelPlan
    features: FeaturePlan
    groups: GroupPlan
    """How the optimizer treats each trainable parameter."""
    blocks: tuple[str, ...] = ()
    """Names of the model's repeated blocks, in execution order."""
    head: HeadPlan | None = None
    """What is done to the output head; None when there is none."""
    idle: IdlePlan = NO_IDLE_TOWERS
    """What keeps ranks in step which lack a modality."""
    router_numbers: int = 0
    """How many numbers of each router pass between pipeline stages; 0: there is no term over the routers."""

    @property
    def precision(self) -> Precision:
        """The formats that are computed in."""
        return Precision.of(self.parallel.sharding.section)

    def describe(self) -> dict[str, str]:
        """A line for each part that does something, by a word for the log."""
        parallel = self.parallel
        lines = {"split": parallel.describe(), "shard": parallel.sharding.describe()}
        if parallel.context is not None:
            lines["spread"] = parallel.context.describe()
        if parallel.towers is not None:
            lines["media"] = parallel.towers.describe()
        if self.features.recomputed and parallel.tensor is not None:
            lines["inputs"] = self.features.describe_inputs(parallel.sizes.tp)
        lines["groups"] = self.groups.describe()
        return {word: line for word, line in lines.items() if line}
