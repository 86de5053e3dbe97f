"""Which modules are gathered and reduced together, and along which dimension each parameter is cut. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from mindspeed_mm.core.errors import CollectedErrors, ConfigError
from mindspeed_mm.core.patterns import holding_others, is_inside, resolve_patterns
from mindspeed_mm.fsdp.distributed.expert.plan import check_inside, padding_warnings, undivided
from mindspeed_mm.fsdp.distributed.pipeline.plan import StagePlan, check_units
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import (
    Unit,
    check_dtypes,
    check_reshard,
    innermost_first,
    names_of_units,
    plan_units,
)
from mindspeed_mm.fsdp.models.behaviour.quantized_linear import check_sharded_bytes
from mindspeed_mm.fsdp.params.parallel_args import FsdpPlan
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes
from mindspeed_mm.fsdp.utils.model_parts import module_names

_KEY = "parallel.fsdp_plan"
_HEADLINE = "the model cannot be sharded as the plan says"
_NOTHING_HOOKED = (
    f"{_KEY}.hook_modules has no effect: nothing inside these modules is wrapped on its own. It is for blocks with "
    "experts that are spread (expert_parallel_size above 1), or with modules of fsdp_plan.apply_modules inside."
)


@dataclass(frozen=True)
class ShardingPlan:
    """What `fully_shard` will do to a whole model. Names are of the whole; a stage of a pipeline takes its own."""

    section: FsdpPlan
    """Precision, resharding, offload and prefetching, as applied."""
    is_sharded: bool = True
    """False: one process whose precision and offload ask nothing of `fully_shard` keeps plain parameters."""
    units: tuple[Unit, ...] = ()
    """In execution order; what none of them holds belongs to the root. Experts that are spread are not among them."""
    experts: tuple[str, ...] = ()
    """Expert modules, which are cut over the ranks of their own mesh, inside the units."""
    ignored: tuple[str, ...] = ()
    """Modules that stay plain tensors, with everything below them."""
    copies: tuple[str, ...] = ()
    """Those of the ignored modules that are trained: whole on every rank, computed in `param_dtype`, their gradients
    summed."""
    hooked: tuple[str, ...] = ()
    """Units whose inner wrapped modules are gathered together with them."""
    on_host: tuple[str, ...] = ()
    """Frozen parameters that wait on the host, whole on every rank."""
    cut_dims: Mapping[str, int] = field(default_factory=dict)
    """Parameter → the dimension to cut, where it is not the first."""
    whole_towers: tuple[str, ...] = ()
    """Towers that stay whole although the decoder is split: their units are cut over the tensor ranks, too."""

    @property
    def prefetch(self) -> tuple[int, int]:
        """How many units are gathered ahead in the forward pass, and in the backward pass."""
        return self.section.num_to_forward_prefetch, self.section.num_to_backward_prefetch

    def describe(self) -> str:
        """One line for the log."""
        if not self.is_sharded:
            return "plain parameters on one process"
        parts = [f"{len(self.units)} units and the root"]
        if self.ignored:
            parts.append(f"{len(self.ignored)} modules left out")
        if self.cut_dims:
            parts.append(f"{len(self.cut_dims)} parameters cut along another dimension")
        return ", ".join(parts)


@dataclass(frozen=True)
class ShardingWishes:
    """What a model and the other axes say of sharding.

    Args:
        shard_modules: The model's own list of modules to wrap one by one, in execution order.
        tie_groups: Names of modules that share a parameter.
        experts: Names of the expert modules that are spread.
        whole_towers: Names of the towers that stay whole although the decoder is split.
        stages: Of a pipeline.
        on_host: Names of the frozen parameters that wait on the host.
    """

    shard_modules: Sequence[str] = ()
    tie_groups: Sequence[Sequence[str]] = ()
    experts: tuple[str, ...] = ()
    whole_towers: tuple[str, ...] = ()
    stages: StagePlan | None = None
    on_host: tuple[str, ...] = ()


def resolve_sharding(
    model: nn.Module, section: FsdpPlan, sizes: ParallelSizes, wishes: ShardingWishes, *, ranks_known: bool = True
) -> tuple[ShardingPlan, list[str]]:
    """The plan of a whole model, and sentences for the user about what it costs.

    Args:
        model: Whole, with adapters; parameters on meta or real, ties live.
        section: `parallel.fsdp_plan` as applied.
        sizes: Of the groups.
        wishes: What the model and the other axes say.
        ranks_known: False: `sizes` are the least that fit, and what depends on the number of data ranks is not judged.

    Raises:
        ConfigError: With all problems.
        MachineError: The installed torch cannot shard what the model has.
    """
    errors = CollectedErrors()
    wrapped, ignored, hooked = _resolve_names(model, section, wishes, errors)
    if sizes.world == 1 and changes_nothing_on_one_rank(section):
        errors.raise_all(_HEADLINE)
        return ShardingPlan(section, is_sharded=False, ignored=tuple(ignored), on_host=wishes.on_host), []
    errors.attempt(check_sharded_bytes, model)
    units = _plan_units(wrapped, ignored, wishes, errors)
    errors.attempt(_check_hooked, hooked, units)
    if ranks_known:
        errors.attempt(check_reshard, section.reshard_after_forward, sizes.fsdp)
    errors.attempt(_check_unit_dtypes, model, units, wishes.experts, ignored)
    errors.raise_all(_HEADLINE)
    cut_dims: dict[str, int] = {}
    costs: list[str] = []
    if not wishes.experts:  # those that are spread are cut over a mesh of their own
        cut_dims = {name: dim for name, _, dim in undivided(model, sizes.fsdp) if dim is not None}
        if ranks_known:
            costs += padding_warnings(model, sizes.fsdp)
    holding = holding_others(hooked, [*wishes.experts, *names_of_units(units)])
    if hooked and not holding:
        costs.append(_NOTHING_HOOKED)
    copies = []
    if sizes.world > 1 or section.param_dtype is not None:
        copies = [name for name in ignored if _is_trained(model.get_submodule(name))]
    plan = ShardingPlan(
        section,
        units=tuple(units),
        experts=wishes.experts,
        ignored=tuple(ignored),
        copies=tuple(copies),
        hooked=tuple(holding),
        on_host=wishes.on_host,
        cut_dims=cut_dims,
        whole_towers=wishes.whole_towers,
    )
    return plan, costs


def _resolve_names(
    model: nn.Module, section: FsdpPlan, wishes: ShardingWishes, errors: CollectedErrors
) -> tuple[list[str], list[str], list[str]]:
    """Modules to wrap, modules to leave out, and modules whose inner ones are gathered together with them."""
    names = module_names(model)

    def resolve(key: str, patterns: Sequence[str] | None) -> list[str]:
        if not patterns:
            return []
        return errors.attempt(resolve_patterns, patterns, names, key=f"{_KEY}.{key}") or []

    named = resolve("apply_modules", section.apply_modules)
    ignored = _outermost(resolve("ignored_modules", section.ignored_modules))
    if wishes.stages is not None:
        errors.attempt(check_units, named, wishes.stages, f"{_KEY}.apply_modules")
    return named or list(wishes.shard_modules), ignored, resolve("hook_modules", section.hook_modules)


def _plan_units(wrapped: list[str], ignored: list[str], wishes: ShardingWishes, errors: CollectedErrors) -> list[Unit]:
    """What is gathered together; experts that are spread have a mesh of their own, inside the units."""
    units = _with_towers(plan_units(wrapped, wishes.tie_groups, ignored), wishes.whole_towers, ignored)
    if not wishes.experts:
        return units
    wrapped_names = names_of_units(units)

    def is_wrapped(name: str) -> bool:
        return is_inside(name, wrapped_names) and not is_inside(name, ignored)

    errors.attempt(check_inside, wishes.experts, is_wrapped)
    return [unit for unit in units if not set(unit.names) & set(wishes.experts)]


def changes_nothing_on_one_rank(plan: FsdpPlan) -> bool:
    """Whether sharding over one rank would only cost time: for gathering what is there already it takes a third of the
    step of a small model (`python -m benchmarks step_time`). Precision and offload are its work on one rank too."""
    return not plan.cpu_offload and {plan.param_dtype, plan.reduce_dtype, plan.output_dtype} == {None}


def _outermost(names: Sequence[str]) -> list[str]:
    return [name for name in names if not is_inside(name, set(names) - {name})]


def _with_towers(units: Sequence[Unit], towers: Collection[str], ignored: Sequence[str]) -> list[Unit]:
    """Units with those of whole towers marked. A tower that is not a unit becomes one, which sums its gradients."""
    wrapped = names_of_units(units)
    missing = [Unit((name,)) for name in towers if name not in wrapped and not is_inside(name, ignored)]
    return [Unit(unit.names, of_tower=is_inside(unit.names[0], towers)) for unit in (*units, *missing)]


def _check_hooked(hooked: Sequence[str], units: Sequence[Unit]) -> None:
    """Raise `ConfigError` unless every hooked module is a unit."""
    alone = [unit.names[0] for unit in units if len(unit.names) == 1]
    way_out = f"Name modules of fsdp_plan.apply_modules, e.g. '{alone[0]}'." if alone else ""
    for name in hooked:
        if name not in alone:
            raise ConfigError(f"'{name}' is not wrapped itself", key=f"{_KEY}.hook_modules", way_out=way_out)


def _check_unit_dtypes(
    model: nn.Module, units: Sequence[Unit], experts: Collection[str], ignored: Collection[str]
) -> None:
    """Raise `ConfigError` when trainable parameters that would be reduced together differ in dtype."""

    def parameters_of(names: Iterable[str]) -> set[nn.Parameter]:
        found: set[nn.Parameter] = set()
        for name in names:
            found.update(model.get_submodule(name).parameters())
        return found

    # From the inside out, as they are wrapped: a unit reduces what no unit inside it holds, the root what is left.
    taken = parameters_of((*experts, *ignored))
    for unit in innermost_first(units):
        own = parameters_of(unit.names) - taken
        check_dtypes(unit.names, own)
        taken |= own
    check_dtypes(("the root",), parameters_of([""]) - taken)


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
