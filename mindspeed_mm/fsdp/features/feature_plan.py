"""Which modules each feature of the `features` section works on, resolved once from the whole model: those that its
patterns name, or the model's own blocks. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import nn

from mindspeed_mm.core.errors import CollectedErrors, ConfigError, MachineError
from mindspeed_mm.core.patterns import is_inside, resolve_patterns
from mindspeed_mm.fsdp.features.memory.chunk_mbs import check_slices
from mindspeed_mm.fsdp.features.memory.recompute import check_skipped_kernels
from mindspeed_mm.fsdp.features.memory.weight_offload import check_weights_can_wait
from mindspeed_mm.fsdp.features.speed.choice import (
    MOST_COMPILATIONS,
    NOT_ASKED,
    Machine,
    SpeedChoice,
    SpeedFacts,
    choose_compile,
)
from mindspeed_mm.fsdp.features.speed.compiled_blocks import check_backend, modules_to_compile
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.rules.plan import DISTRIBUTED, why_inputs_stay_whole
from mindspeed_mm.fsdp.utils.model_parts import module_names

RECOMPUTE_MODULES = "features.recompute_plan.apply_modules"
OFFLOAD_MODULES = "features.activation_offload_plan.apply_modules"
WAITING_MODULES = "features.weight_offload_plan.apply_modules"
SLICED_MODULES = "features.chunkmbs_plan.apply_modules"


@dataclass(frozen=True)
class FeaturePlan:
    """What the features do to a whole model: names of modules, none where a feature is off."""

    recomputed: tuple[str, ...] = ()
    """Computed again in the backward pass."""
    offloaded: tuple[str, ...] = ()
    """Whose activations wait on the host."""
    waiting: tuple[str, ...] = ()
    """Whose frozen weights wait on the host."""
    sliced: tuple[str, ...] = ()
    """Run on a few rows at a time."""
    compiled: tuple[str, ...] = ()
    """In graphs of torch.compile."""
    compiler: SpeedChoice = NOT_ASKED
    """Who compiles them, and why; who does not, where there are none."""
    most_compilations: int | None = None
    """Of a block, where nobody asked for compiled blocks; None: as many as it takes."""
    keeps_operations: bool = False
    """Whether recomputation keeps results of single operations: it is then compiled together with what it computes."""
    kept_kinds: tuple[str, ...] = ()
    """Kinds of work whose results recomputation keeps: "attention", "linear attention", or "all" products."""
    distributed: tuple[str, ...] = ()
    """Of the recomputed ones, those whose inputs are divided among the ranks of tensor parallelism."""
    kept_whole: str = ""
    """Why each of these ranks keeps the inputs of all of them, where it does."""

    def describe_inputs(self, ranks: int) -> str:
        """One line for the log: what ranks of tensor parallelism keep of what recomputed modules are given."""
        if self.distributed:
            return f"of {len(self.distributed)} recomputed blocks divided among {ranks} tensor ranks"
        return f"of recomputed modules kept whole by {ranks} tensor ranks: {self.kept_whole}"

    def by_key(self) -> dict[str, tuple[str, ...]]:
        """Key of a feature's patterns → names of the modules that it works on."""
        named = {
            RECOMPUTE_MODULES: self.recomputed,
            OFFLOAD_MODULES: self.offloaded,
            WAITING_MODULES: self.waiting,
            SLICED_MODULES: self.sliced,
        }
        return {key: names for key, names in named.items() if names}


def resolve_features(
    model: nn.Module,
    features: FeatureArguments,
    blocks: Sequence[str] = (),
    *,
    model_args: ModelArguments | None = None,
    towers: Collection[str] = (),
    speed: SpeedFacts | None = None,
) -> FeaturePlan:
    """The plan of a model, which stays as it is.

    Args:
        model: Whole.
        features: The `features` section.
        blocks: Names of the model's repeated blocks, in execution order. Patterns in a feature's plan win over them.
        model_args: The `model` section, for its keys `skip_*_recompute`; as if it were empty when None.
        towers: Names of the towers in front of a language model, whose blocks have no rows.
        speed: What `auto` of `features.compile` is decided by; None: this machine alone.

    Raises:
        ConfigError: With every problem: a pattern matches nothing or what is never called, modules lie inside one
            another, layers that a key is about are missing.
        MachineError: The compiler's backend has nothing here to make kernels with.
    """
    keys = model_args or ModelArguments()
    errors = CollectedErrors()
    recomputed = offloaded = waiting = sliced = compiled = None
    if features.recompute:
        patterns = features.recompute_plan.apply_modules
        recomputed = errors.attempt(select_modules, model, patterns, blocks, RECOMPUTE_MODULES)
        errors.attempt(check_skipped_kernels, model, keys)
    if features.enable_activation_offload:
        patterns = features.activation_offload_plan.apply_modules
        offloaded = errors.attempt(select_modules, model, patterns, blocks, OFFLOAD_MODULES)
    if features.enable_weight_offload:
        patterns = features.weight_offload_plan.apply_modules
        waiting = errors.attempt(select_modules, model, patterns, blocks, WAITING_MODULES)
        errors.attempt(check_weights_can_wait, model, waiting or (), recomputed or ())
    if features.enable_chunk_mbs:
        sliced = errors.attempt(_modules_to_slice, model, features, blocks, towers)
    compiler = choose_compile(features.compile, speed or SpeedFacts(Machine.here()), features.compile_plan.backend)
    if compiler.what and features.compile == "auto" and not features.compile_plan.apply_modules:
        compiler, compiled = _compiled_unasked(model, features, blocks, compiler)
    elif compiler.what:
        errors.attempt(check_backend, features.compile_plan)
        compiled = errors.attempt(modules_to_compile, model, features.compile_plan, blocks)
    errors.attempt(_check_apart, offloaded or (), recomputed or ())
    errors.raise_all("the features do not fit the model")
    is_selective = features.recompute and features.recompute_plan.mode == "selective"
    return FeaturePlan(
        tuple(recomputed or ()),
        tuple(offloaded or ()),
        tuple(waiting or ()),
        tuple(sliced or ()),
        tuple(compiled or ()),
        compiler,
        MOST_COMPILATIONS if features.compile == "auto" else None,
        keeps_operations=is_selective or (features.recompute and keys.skip_flash_attn_recompute),
        kept_kinds=_kept_kinds(features, keys),
    )


def _compiled_unasked(
    model: nn.Module, features: FeatureArguments, blocks: Sequence[str], compiler: SpeedChoice
) -> tuple[SpeedChoice, list[str]]:
    """The model's own blocks, or why they cannot be compiled."""
    try:
        check_backend(features.compile_plan)
        return compiler, modules_to_compile(model, features.compile_plan, blocks)
    except (ConfigError, MachineError) as error:
        return SpeedChoice("", error.problems[0].what), []


def _kept_kinds(features: FeatureArguments, keys: ModelArguments) -> tuple[str, ...]:
    if not features.recompute:
        return ()
    if features.recompute_plan.mode == "selective":
        return ("all",)
    kinds = []
    if keys.skip_flash_attn_recompute:
        kinds.append("attention")
    if keys.skip_gdn_recompute or keys.skip_kda_recompute:
        kinds.append("linear attention")
    return tuple(kinds)


def _modules_to_slice(
    model: nn.Module, features: FeatureArguments, blocks: Sequence[str], towers: Collection[str]
) -> list[str]:
    with_rows = [name for name in blocks if not is_inside(name, towers, strict=True)]
    found = select_modules(model, features.chunkmbs_plan.apply_modules, with_rows, SLICED_MODULES)
    check_slices(model, found, features.chunkmbs_plan)
    return found


def _check_apart(offloaded: Sequence[str], recomputed: Sequence[str]) -> None:
    for outer in recomputed:
        for inner in offloaded:
            if is_inside(inner, (outer,), strict=True):
                raise ConfigError(
                    f"'{inner}' lies inside '{outer}', which is computed again instead of keeping anything",
                    key=OFFLOAD_MODULES,
                    way_out=f"Name '{outer}': its input is then kept on the host.",
                )


# --- inputs that tensor ranks hold alike ------------------------------------------------------------------------------


def distribute_inputs(
    plan: FeaturePlan, features: FeatureArguments, parallel: ParallelArguments, model: nn.Module, alike: Collection[str]
) -> FeaturePlan:
    """The plan, with the blocks whose inputs are divided among the ranks of tensor parallelism.

    Blocks with experts are left out: where rounding differs from rank to rank, routers may choose otherwise by what was
    gathered than in the first pass.

    Args:
        plan: Of the whole model.
        features: The `features` section.
        parallel: The `parallel` section.
        model: The whole model.
        alike: Names of the blocks that all these ranks call with the same tensors.

    Raises:
        ConfigError: It is asked for, and no block allows it.
    """
    found = [name for name in plan.recomputed if name in alike and not _has_experts(model.get_submodule(name))]
    asked, (why, _) = features.recompute_plan.distribute_saved_activations, why_inputs_stay_whole(parallel, features)
    if why or asked is False:
        return replace(plan, kept_whole=why or f"{DISTRIBUTED} is false")
    if plan.compiled:
        why = "blocks are compiled, which no test of ours runs with inputs that were gathered"
    elif not found:
        why = "none is a whole block without experts that all of them call with the same tensors"
    else:
        return replace(plan, distributed=tuple(found))
    if asked is True:
        raise ConfigError(f"true, but {why}", key=DISTRIBUTED, way_out="Leave it out.")
    return replace(plan, kept_whole=why)


def _has_experts(block: nn.Module) -> bool:
    return any("experts" in name.split(".") for name in module_names(block))


# --- the modules of a feature -----------------------------------------------------------------------------------------


def select_modules(model: nn.Module, patterns: Sequence[str], blocks: Sequence[str], key: str) -> list[str]:
    """Names of modules, none inside another, each of which is called itself.

    Args:
        model: The whole model.
        patterns: Of the feature's plan.
        blocks: What to take where there are none.
        key: The patterns' configuration key.

    Raises:
        ConfigError: A pattern matches nothing or what is never called, modules lie inside one another, or the model
            has no blocks of its own.
    """
    names = module_names(model)
    found = resolve_patterns(patterns, names, key=key) if patterns else list(blocks)
    if not found:
        raise ConfigError(
            f"{type(model).__name__} declares no repeated blocks",
            key=key,
            way_out="Name modules that are repeated, e.g. 'model.layers.{*}'.",
        )
    _check_called(model, found, key)
    _check_not_nested(found, key)
    return found


def _check_called(model: nn.Module, names: Sequence[str], key: str) -> None:
    for name in names:
        module = model.get_submodule(name)
        if type(module).forward is nn.Module.forward:
            raise ConfigError(
                f"'{name}' is a {type(module).__name__}, which is never called itself",
                key=key,
                way_out=f"Name what it holds: '{name}.{{*}}'.",
            )


def _check_not_nested(names: Sequence[str], key: str) -> None:
    for outer in names:
        if inner := next((name for name in names if name.startswith(f"{outer}.")), None):
            raise ConfigError(
                f"'{inner}' lies inside '{outer}', which is named too: it would be done twice",
                key=key,
                way_out="Name one of them.",
            )
