"""Which modules expert parallelism spreads, whether they can be, and along which dimension sharding cuts them.

Fused parameters are (E, …): rank r of the axis `ep` holds E / ep consecutive experts of every layer, and the axis
`efsdp` cuts each expert on dim 1, as dim 0 would be padded to the number of ranks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.patterns import is_inside, resolve_patterns
from mindspeed_mm.fsdp.distributed.tensor.sizes import nearest_divisors
from mindspeed_mm.fsdp.ops.experts import fused_experts
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.parallel_args import EpPlan, ParallelArguments
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, has_all, module_names

KEY = "parallel.expert_parallel_size"
_MODULES = "parallel.ep_plan.apply_modules"
_DISPATCHER = "parallel.ep_plan.dispatcher"
DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
"""Sizes of a group that DeepEP's kernels are configured for (`Buffer.get_dispatch_config` of releases 1.2.1, 2.1.0)."""
_MOST = 5
"""How many problems a message lists."""


@dataclass(frozen=True)
class ExpertPlan:
    """What is spread, for the log and for sharding."""

    modules: tuple[str, ...]
    """Names of the expert modules."""
    experts: int
    """Experts of a layer; the most, where layers differ."""
    sizes: ParallelSizes
    dispatcher: str
    copies: int = 0
    """Copies of busy experts that a rank may hold."""

    def describe(self) -> str:
        """One line for the log."""
        sizes = self.sizes
        parts = [f"{self.experts} experts × {len(self.modules)} layers, {self.experts // sizes.ep} on a rank"]
        parts.append(f"{self.dispatcher} over ep {sizes.ep}")
        if sizes.efsdp > 1:
            parts.append(f"each cut over efsdp {sizes.efsdp}")
        if sizes.edp > 1:
            parts.append(f"edp {sizes.edp} copies")
        if self.copies:
            parts.append(f"up to {self.copies} busy ones more")
        return ", ".join(parts)


def is_spread(parallel: ParallelArguments) -> bool:
    """Whether experts are laid out in another way than the rest of the model. `expert_fully_shard_parallel_size` alone
    is about no group: files for one rank of experts carry 1, and mean sharding like everything else."""
    return parallel.expert_parallel_size > 1


def resolve_expert_plan(model: nn.Module, parallel: ParallelArguments, sizes: ParallelSizes, copies: int) -> ExpertPlan:
    """What the configuration asks for, checked against the model. Nothing is changed.

    Args:
        model: Built, not sharded.
        parallel: The `parallel` section.
        sizes: Of the groups.
        copies: `ep_balance_plan.max_dup_experts_num`, 0 without balance.

    Raises:
        ConfigError: With all problems.
    """
    names = check_experts(model, parallel, sizes.ep, sizes.efsdp, copies)
    experts = max(expert_count(model.get_submodule(name)) for name in names)
    return ExpertPlan(tuple(names), experts, sizes, parallel.ep_plan.dispatcher, copies)


def check_experts(model: nn.Module, parallel: ParallelArguments, ep: int, efsdp: int, copies: int) -> list[str]:
    """Names of the modules to spread, when all of them can be. Arguments and errors as of `resolve_expert_plan`."""
    check_expert_plan(parallel)
    names = expert_modules(model, parallel.ep_plan)
    modules: dict[str, nn.Module] = {}
    counts: dict[str, int] = {}
    own_forwards: list[str] = []
    for name in names:
        module = modules[name] = model.get_submodule(name)
        counts[name] = expert_count(module)
        if has_own_forward(module):
            own_forwards.append(name)
    problems = [
        *size_problems(counts, ep),
        *_part_problems(modules),
        *_own_plan_problems(model, parallel.ep_plan, names),
    ]
    if copies and own_forwards:
        what = f"{own_forwards[0]} has a forward of its own (ep_forward), which knows no copies of experts"
        problems.append(Problem(what, key="features.enable_ep_balance", way_out="Set it to false."))
    if not problems:  # how experts are cut is a question of experts that can be spread
        for name, module in modules.items():
            problems += _cut_problems(name, module, ep, efsdp)
    if problems:
        raise ConfigError("the experts cannot be spread as the plan says", problems=problems[:_MOST])
    return names


def check_expert_plan(parallel: ParallelArguments) -> None:
    """Raise `ConfigError` for what cannot run with any model, or not on this machine."""
    needs = {"mc2": ("npu", "torch_npu"), "deepep": ("cuda", "deep_ep")}.get(parallel.ep_plan.dispatcher)
    if needs is None:
        return
    device, package = needs
    if get_device_type() != device:
        reason = f"needs {device.upper()} devices, and this machine computes on {get_device_type()}"
    elif importlib.util.find_spec(package) is None:
        reason = f"needs the package {package}, which is not installed"
    elif parallel.ep_plan.dispatcher == "mc2":
        reason = "is not supported yet: nothing could be measured with it"
    elif parallel.fsdp_plan.computed_in != "bf16":
        reason = f"sends rows in bf16, and fsdp_plan.param_dtype is {parallel.fsdp_plan.computed_in}"
    elif parallel.expert_parallel_size not in DEEPEP_RANKS:
        sizes = ", ".join(map(str, DEEPEP_RANKS))
        reason = f"has kernels for groups of {sizes} ranks, and {KEY} is {parallel.expert_parallel_size}"
    else:
        return
    raise ConfigError(
        f"'{parallel.ep_plan.dispatcher}' {reason}", key=_DISPATCHER, way_out="Choose alltoall or allgather."
    )


def balance_copies(features: FeatureArguments, parallel: ParallelArguments) -> int:
    """Copies of busy experts that a rank may hold; 0 without `enable_ep_balance`.

    Raises:
        ConfigError: There are no ranks to balance between, or the dispatcher has no way for copies.
    """
    if not features.enable_ep_balance:
        return 0
    key, size, dispatcher = "features.enable_ep_balance", parallel.expert_parallel_size, parallel.ep_plan.dispatcher
    if size == 1:
        raise ConfigError(
            f"true, but {KEY} is 1: all ranks hold all experts", key=key, way_out=f"Set it to false, or raise {KEY}."
        )
    if dispatcher != "alltoall":
        raise ConfigError(f"true, which '{dispatcher}' cannot do", key=key, way_out=f"Set {_DISPATCHER}: alltoall.")
    return features.ep_balance_plan.max_dup_experts_num


def expert_modules(model: nn.Module, plan: EpPlan) -> list[str]:
    """Names of the modules to spread: those that the patterns name, else all with fused experts or an `ep_forward`.

    Raises:
        ConfigError: There are none, or a pattern names another module.
    """
    fused = fused_experts(model)
    known = [name for name, module in model.named_modules() if name in fused or has_own_forward(module)]
    if not plan.apply_modules:
        if known:
            return known
        raise ConfigError(
            f"{type(model).__name__} has no experts in fused parameters behind transformers' interface",
            key=KEY,
            way_out=f"Set it to 1, or give the expert module an ep_forward and name it in {_MODULES}.",
        )
    names: list[str] = []
    for named in resolve_patterns(plan.apply_modules, module_names(model), key=_MODULES):
        name = _below_adapters(model, named)
        if name not in known:
            raise _not_experts(name, known)
        if name not in names:
            names.append(name)
    return names


def _not_experts(wrong: str, known: Sequence[str]) -> ConfigError:
    way_out = "Set expert_parallel_size to 1."
    if known:
        inside = [name for name in known if is_inside(name, (wrong,))]
        example = (inside or known)[0]
        way_out = f"Name the expert modules, such as '{example}'."
    return ConfigError(
        f"'{wrong}' holds no fused experts of its own and has no ep_forward", key=_MODULES, way_out=way_out
    )


def has_own_forward(module: nn.Module) -> bool:
    """Whether a plugin's module says itself how its experts are spread (`ep_forward`)."""
    return has_all(module, "ep_forward")


def _below_adapters(model: nn.Module, name: str) -> str:
    """The module that adapters on its parameters were put around, under its own name of now."""
    while has_all(model.get_submodule(name), "parameter_name", "base_layer"):
        name = f"{name}.base_layer"
    return name


def expert_count(module: nn.Module) -> int:
    """Experts of a module: by its fused parameters, whose first dimension counts them."""
    count = attribute_at(module, "num_experts")
    if isinstance(count, int):
        return count
    return next(module.parameters()).shape[0]


def size_problems(counts: Mapping[str, int], ep: int) -> list[Problem]:
    """One problem for each number of experts that the ranks do not divide. Pure.

    Args:
        counts: Module → experts.
        ep: `parallel.expert_parallel_size`.
    """
    first = {count: name for name, count in reversed(list(counts.items()))}
    problems = []
    for count, name in first.items():
        if count % ep:
            nearest = ", ".join(map(str, nearest_divisors(count, ep)))
            what = f"{ep} does not divide the {count} experts of {name}"
            problems.append(Problem(what, key=KEY, way_out=f"Nearest sizes that do: {nearest}."))
    return problems


def check_inside(experts: Iterable[str], is_wrapped: Callable[[str], bool]) -> None:
    """Raise `ConfigError` unless every expert module lies within what the FSDP plan wraps.

    Args:
        experts: Names of the expert modules.
        is_wrapped: Whether a module is one of the wrapped ones or lies inside one.
    """
    outside = [name for name in experts if not is_wrapped(name)]
    if not outside:
        return
    what = f"the expert module '{outside[0]}' lies in no module that fsdp_plan.apply_modules wraps"
    if len(outside) > 1:
        what += f", nor do {len(outside) - 1} more"
    block = outside[0].rpartition(".")[0].rpartition(".")[0]
    raise ConfigError(what, key="parallel.fsdp_plan.apply_modules", way_out=f"Wrap the block around it: '{block}'.")


def cut_dim(shape: Sequence[int], ep: int, shards: int) -> int | None:
    """The dimension on which sharding cuts an expert parameter: 1, or the next that the ranks divide; 0 last, where
    the experts of a rank are divided. None: no dimension is. Pure.

    Args:
        shape: (E, …), the whole parameter.
        ep: Ranks that share the experts.
        shards: Ranks that share each of them.
    """
    for dim in range(1, len(shape)):
        if shape[dim] % shards == 0:
            return dim
    experts_of_rank = shape[0] // ep
    if experts_of_rank % shards == 0:
        return 0
    return None


def undivided(model: nn.Module, shards: int) -> Iterator[tuple[str, nn.Parameter, int | None]]:
    """Fused experts that dim 0 would pad, as there are no equally many on each of the ranks: (name, parameter, the
    dimension to cut instead; None when there is none)."""
    for module_name, module in fused_experts(model).items():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.shape[0] == expert_count(module) and parameter.shape[0] % shards:
                yield f"{module_name}.{name}", parameter, cut_dim(parameter.shape, 1, shards)


def padding_warnings(model: nn.Module, shards: int) -> list[str]:
    """A sentence for the user when experts are padded on a sharding group of this size."""
    padded = [(name, parameter) for name, parameter, dim in undivided(model, shards) if dim is None]
    if not padded:
        return []
    name, parameter = max(padded, key=lambda item: item[1].numel())
    experts = parameter.shape[0]
    factor = -(-experts // shards) * shards / experts
    shape = " × ".join(map(str, parameter.shape[1:]))
    return [
        f"{name}: {experts} experts on {shards} ranks are padded, {factor:.1f} times the memory and traffic, and "
        f"{shape} cannot be cut evenly instead: set {KEY}"
    ]


def _part_problems(modules: Mapping[str, nn.Module]) -> list[Problem]:
    """Parameters that are not experts': their gradients would need a sum of their own."""
    for name, module in modules.items():
        for inner, parameter in module.named_parameters():
            if parameter.shape[:1] != (expert_count(module),):
                what = f"{name}.{inner} {tuple(parameter.shape)} is not one of {expert_count(module)} experts each"
                return [Problem(what, key=KEY, way_out="Set it to 1 for this model.")]
    return []


def _own_plan_problems(model: nn.Module, plan: EpPlan, names: Sequence[str]) -> list[Problem]:
    """`apply_efsdp_modules` names the same modules, or none."""
    key = "parallel.ep_plan.apply_efsdp_modules"
    if not plan.apply_efsdp_modules:
        return []
    found = resolve_patterns(plan.apply_efsdp_modules, module_names(model), key=key)
    differing = sorted(set(found) ^ set(names))
    if not differing:
        return []
    what = f"'{differing[0]}' is in only one of apply_modules and apply_efsdp_modules"
    return [Problem(what, key=key, way_out="Leave apply_efsdp_modules out: it is the same modules.")]


def _cut_problems(name: str, module: nn.Module, ep: int, efsdp: int) -> Iterator[Problem]:
    for inner, parameter in module.named_parameters():
        if cut_dim(parameter.shape, ep, efsdp) is None:
            shape = " × ".join(map(str, parameter.shape))
            fitting = nearest_divisors(parameter.shape[-1], efsdp)
            yield Problem(
                f"{efsdp} ranks cannot cut {name}.{inner} ({shape}, {ep} ways by expert) evenly",
                key="parallel.expert_fully_shard_parallel_size",
                way_out=f"Nearest sizes that do: {', '.join(map(str, fitting))}.",
            )
