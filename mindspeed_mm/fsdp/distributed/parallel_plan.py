"""What the `parallel` section does to a model, resolved once from the whole model, before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from mindspeed_mm.core.errors import CollectedErrors
from mindspeed_mm.core.patterns import is_inside, resolve_patterns
from mindspeed_mm.fsdp.distributed.context.plan import ContextPlan, resolve_context_plan
from mindspeed_mm.fsdp.distributed.expert.plan import ExpertPlan, is_spread, resolve_expert_plan
from mindspeed_mm.fsdp.distributed.pipeline.apply import resolve_stages
from mindspeed_mm.fsdp.distributed.pipeline.plan import StagePlan
from mindspeed_mm.fsdp.distributed.sharding.plan import ShardingPlan, ShardingWishes, resolve_sharding
from mindspeed_mm.fsdp.distributed.tensor.plan import TensorPlan
from mindspeed_mm.fsdp.distributed.tensor.sizes import resolve_tensor_parallel
from mindspeed_mm.fsdp.distributed.towers.groups import check_tower_sums
from mindspeed_mm.fsdp.distributed.towers.media import check_towers
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.sizes.encoder import EncoderSizes, resolve_encoder_sizes
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes
from mindspeed_mm.fsdp.utils.model_parts import module_names

HEADLINE = "the parallel plan does not fit the model"


@dataclass(frozen=True)
class TowerPlan:
    """Towers that are laid out over ranks otherwise than their decoder."""

    towers: tuple[str, ...]
    """Names of their modules."""
    sizes: EncoderSizes
    """Who shares media."""

    @property
    def whole(self) -> tuple[str, ...]:
        """Towers that are not split although the decoder is: ranks that split it encode different media."""
        if self.sizes.copies == 1:
            return ()
        return self.towers

    def describe(self) -> str:
        """One line for the log."""
        return self.sizes.describe()


@dataclass(frozen=True)
class ParallelPlan:
    """What is done to a model on every axis; None where an axis does nothing. Names are those of the whole model."""

    section: ParallelArguments
    """As applied: see `as_applied`."""
    sizes: ParallelSizes
    sharding: ShardingPlan
    tensor: TensorPlan | None = None
    context: ContextPlan | None = None
    experts: ExpertPlan | None = None
    stages: StagePlan | None = None
    towers: TowerPlan | None = None
    gathers_logits: bool = False
    """Whether the output head returns the whole vocabulary on every tensor-parallel rank."""
    warnings: tuple[str, ...] = ()
    """Sentences for the user about what the plan costs."""

    def called_alike(self, blocks: Iterable[str]) -> list[str]:
        """Those of the model's repeated blocks that all ranks of the axis `tp` call with the same tensors: not where
        each has its own tokens, or a tower media of its own. Only of a plan with that axis."""
        assert self.tensor is not None
        apart = self.towers.towers if self.towers is not None else ()
        found = []
        for block in blocks:
            has_own_tokens = any(is_inside(name, (block,)) for name in self.tensor.sequence)
            if not has_own_tokens and not is_inside(block, apart):
                found.append(block)
        return found

    def describe(self) -> str:
        """One line for the log: how the model is split."""
        splits = (self.tensor, self.stages, self.experts)
        return "; ".join(split.describe() for split in splits if split is not None)


@dataclass(frozen=True)
class ModelLayout:
    """What resolving a parallel plan must know of a model.

    Args:
        shard_modules: The model's own list of modules to wrap one by one, in execution order. Patterns in
            `fsdp_plan.apply_modules` win over it.
        tie_groups: Names of modules that share a parameter.
        towers: Names of towers in front of a decoder.
        gathers_logits: Under tensor parallelism, let the output head return the whole vocabulary on every rank.
        on_host: Names of the frozen parameters that wait on the host (`enable_weight_offload`).
        expert_copies: Under expert parallelism, copies of busy experts that a rank may hold.
    """

    shard_modules: Sequence[str] = ()
    tie_groups: Sequence[Sequence[str]] = ()
    towers: Collection[str] = ()
    gathers_logits: bool = False
    expert_copies: int = 0
    on_host: tuple[str, ...] = ()


def resolve_parallel_plan(
    model: nn.Module,
    parallel: ParallelArguments,
    sizes: ParallelSizes,
    layout: ModelLayout,
    *,
    ranks_known: bool = True,
) -> ParallelPlan:
    """The plan of a model. Nothing is changed, no process group is needed.

    Args:
        model: Whole, with adapters; parameters on meta or real, ties live.
        parallel: The `parallel` section.
        sizes: Of the groups.
        layout: What is known of the model.
        ranks_known: False: `sizes` are the least that fit, and what depends on the number of data ranks is not judged.

    Raises:
        ConfigError: With every problem of every axis.
        MachineError: The installed torch cannot do what the plan asks for.
    """
    section = as_applied(parallel, casts_inputs=facts_of(model).kind.casts_inputs)
    errors = CollectedErrors()
    towers = errors.attempt(_resolve_towers, model, section, sizes, layout)
    whole_towers: tuple[str, ...] = ()
    spread_towers = sorted(layout.towers)
    if towers is not None:
        whole_towers = towers.whole
        if towers.sizes.parts > 1:  # ranks of a sequence share media, and do not spread the patches of each
            spread_towers = []
    tensor = None
    if section.tensor_parallel_size > 1:
        tensor = errors.attempt(
            resolve_tensor_parallel, model, section.tp_plan, section.tensor_parallel_size, whole=whole_towers
        )
    experts = None
    expert_modules: tuple[str, ...] = ()
    if is_spread(section):
        experts = errors.attempt(resolve_expert_plan, model, section, sizes, layout.expert_copies)
        if experts is not None:
            expert_modules = experts.modules
    stages = errors.attempt(resolve_stages, model, section)
    context = errors.attempt(
        resolve_context_plan,
        model,
        section.ring_attention_size,
        section.ulysses_parallel_size,
        towers=spread_towers,
    )
    wishes = ShardingWishes(
        layout.shard_modules,
        layout.tie_groups,
        experts=expert_modules,
        whole_towers=whole_towers,
        stages=stages,
        on_host=layout.on_host,
    )
    resolved = errors.attempt(resolve_sharding, model, section.fsdp_plan, sizes, wishes, ranks_known=ranks_known)
    errors.raise_all(HEADLINE)
    assert resolved is not None
    sharding, costs = resolved
    return ParallelPlan(
        section, sizes, sharding, tensor, context, experts, stages, towers, layout.gathers_logits, tuple(costs)
    )


def as_applied(parallel: ParallelArguments, *, casts_inputs: bool) -> ParallelArguments:
    """The section as it is applied. A stage stays gathered for the length of a step: several micro-batches are under
    way in it."""
    changes: dict[str, bool] = {}
    if not casts_inputs:
        changes["cast_forward_inputs"] = False
    if parallel.pipeline_parallel_size > 1:
        changes["reshard_after_forward"] = False
    return parallel.model_copy(update={"fsdp_plan": parallel.fsdp_plan.model_copy(update=changes)})


def _resolve_towers(
    model: nn.Module, parallel: ParallelArguments, sizes: ParallelSizes, layout: ModelLayout
) -> TowerPlan | None:
    encoder = resolve_encoder_sizes(parallel, sizes.dp)
    if encoder is None:
        return None
    plan = TowerPlan(tuple(sorted(layout.towers)), encoder)
    check_towers(model, plan.towers, in_teams=encoder.team > 1)
    key = "parallel.fsdp_plan.ignored_modules"
    names = module_names(model)
    check_tower_sums(model, plan.whole, resolve_patterns(parallel.fsdp_plan.ignored_modules or (), names, key=key))
    return plan
