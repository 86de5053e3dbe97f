"""Linear layers and fused experts whose matrix products run in 8-bit floats, forward and backward, by torchao
(`quantization_plan`).

Weights stay in the masters' type, and so do optimizer states and checkpoints: what is rounded are the operands of each
product, with scales found anew each time (Micikevicius et al. 2022, arXiv:2209.05433; microscaling formats:
Rouhani et al. 2023, arXiv:2310.10537). No parameter changes its name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.core.patterns import compile_pattern, is_inside, resolve_patterns
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.features.speed.mx_products import (
    BLOCK,
    EMULATE,
    GROUP_ROWS,
    SCALES,
    convert_experts,
    convert_linears,
)
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.ops.experts import fused_experts
from mindspeed_mm.fsdp.params.training_args import QuantizationPlan
from mindspeed_mm.fsdp.utils.device import device_capability, get_device_type
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, has_all, head_of
from mindspeed_mm.fsdp.utils.torchao_library import load_torchao

SECTION = "training.quantization_plan"


@dataclass(frozen=True)
class Recipe:
    """A way to compute a matrix product in 8 bits."""

    capability: tuple[int, int]
    """Lowest compute capability of CUDA devices that have the instructions."""
    multiple: int
    """Number that both sides of a weight must be a multiple of."""
    gathers_low: bool
    """Whether weights can be gathered in 8 bits."""
    settings: tuple[str, ...]
    """Keys of `extra_args` that the recipe takes."""
    of_experts: bool = False
    """Whether there are grouped products of the kind."""


_FLOAT8 = ("pad_inner_dim", "round_scales_to_power_of_2", EMULATE)
_MX = ("wgrad_with_hp", "scale_calculation_mode", "block_size", EMULATE)
RECIPES: Mapping[str, Recipe] = {
    "tensorwise": Recipe((8, 9), 16, True, _FLOAT8),
    "rowwise": Recipe((8, 9), 16, False, _FLOAT8),
    "rowwise_with_gw_hp": Recipe((8, 9), 16, False, _FLOAT8),
    "mxfp8": Recipe((10, 0), BLOCK, False, _MX, of_experts=True),
}
ALIASES = {"fp8": "tensorwise", "float8": "tensorwise", "mx": "mxfp8"}
CONVERTERS = ("linear", "quantize.linear.float8", "quantize.linear.mx")
"""Names for linear layers, which are converted where no converter is named, too."""
EXPERT_CONVERTERS = ("quantize.moe.mx",)
"""Names for the grouped products of fused experts."""
_CONVERTERS_KEY = f"{SECTION}.quant_converters"

_SHOWN = 4
"""Layers that the log names."""

Linears = dict[str, nn.Linear]
Experts = dict[str, nn.Module]


@dataclass(frozen=True)
class LowPrecision:
    """What was converted, for the log."""

    recipe: str
    layers: int
    """Linear ones."""
    experts: int
    """Layers of fused experts."""
    left: tuple[str, ...]
    """What is asked for and left out, with the reason."""
    gathers_low: bool
    warnings: tuple[str, ...] = ()
    """What is asked for and has no effect."""

    def __str__(self) -> str:
        gathered = "8 bits" if self.gathers_low else "the plan's type"
        parts = [f"{self.recipe}, {self.layers} linear layers"]
        if self.experts:
            parts.append(f"{self.experts} layers of experts")
        described = f"{', '.join(parts)}, weights gathered in {gathered}"
        if self.left:
            described += f"; left as they are: {', '.join(self.left[:_SHOWN])}"
        if len(self.left) > _SHOWN:
            described += " …"
        return described


def apply_low_precision(model: nn.Module, plan: QuantizationPlan | None) -> None:
    """Let linear layers and experts compute in 8 bits, in place; nothing without a plan. `facts_of(model)` says what
    was done.

    Args:
        model: Whole, before it is split or sharded; adapters are refused by the rules of the configuration.
        plan: `training.quantization_plan`.

    Raises:
        ConfigError: An unknown recipe, converter or setting; a pattern that matches nothing that is converted; sizes
            that the instructions do not take; experts that no grouped product computes.
        MachineError: The device has no such instructions, or torchao or its kernels are not installed.
    """
    if plan is None or plan.recipe_name is None:
        return
    name, recipe = check_plan(plan)
    chosen = choose_layers(model, plan, recipe)
    gathers_low = recipe.gathers_low and plan.enable_fsdp_low_precision_all_gather
    if name == "mxfp8":
        convert_linears(chosen.linears, plan.extra_args, key=SECTION)
        if chosen.experts:
            convert_experts(chosen.experts, plan.extra_args, key=_CONVERTERS_KEY)
    else:
        _convert_to_float8(model, chosen.linears, name, plan.extra_args, gathers_low=gathers_low)
    counts, warnings = (len(chosen.linears), len(chosen.experts)), tuple(_without_effect(plan, name, recipe))
    facts_of(model).note(LowPrecision(name, *counts, chosen.left, gathers_low, warnings))


def _without_effect(plan: QuantizationPlan, name: str, recipe: Recipe) -> Iterator[str]:
    """Sentences about keys that somebody wrote to have weights gathered in 8 bits, which torchao does with one scale
    for a whole weight alone. MindSpeed-MM's own files write them beside mxfp8: such a plan is no error."""
    asked = {
        "enable_fsdp_low_precision_all_gather": plan.enable_fsdp_low_precision_all_gather,
        "fsdp_low_precision_all_gather_mode": plan.fsdp_low_precision_all_gather_mode == "all",
    }
    able = [other for other, its in RECIPES.items() if its.gathers_low]
    for key, is_asked in asked.items():
        if is_asked and key in plan.model_fields_set and not recipe.gathers_low:
            yield (
                f"{SECTION}.{key} has no effect: torchao gathers weights in 8 bits with {', '.join(able)}, and the "
                f"recipe is {name}. They are gathered in the plan's type"
            )


def scales_after_update(model: nn.Module, plan: QuantizationPlan | None) -> bool:
    """Whether the scales of all weights are to be found together after each update, by one reduction
    (`fsdp_low_precision_all_gather_mode: all`), instead of one by one when weights are gathered."""
    converted = facts_of(model).noted(LowPrecision)
    if plan is None or converted is None:
        return False
    return converted.gathers_low and plan.fsdp_low_precision_all_gather_mode == "all"


def find_scales(model: nn.Module) -> None:
    """Find the scales of all weights that are gathered in 8 bits."""
    load_torchao("float8", key=SECTION).precompute_float8_dynamic_scale_for_fsdp(model)


# --- what is refused --------------------------------------------------------------------------------------------------


def check_plan(plan: QuantizationPlan) -> tuple[str, Recipe]:
    """The recipe's own name and the recipe; raises what needs no model (see `apply_low_precision`)."""
    asked = str(plan.recipe_name)
    name = ALIASES.get(asked, asked)
    if name not in RECIPES:
        known = [*RECIPES, *ALIASES]
        raise ConfigError(
            f"there is no recipe '{asked}'",
            key=f"{SECTION}.recipe_name",
            way_out=f"{did_you_mean(asked, known)}There are {', '.join(known)}.",
        )
    recipe = RECIPES[name]
    _check_converters(plan, name, recipe)
    _check_settings(plan, name, recipe)
    _check_device(asked, recipe, emulate=bool(plan.extra_args.get(EMULATE)))
    return name, recipe


def _check_converters(plan: QuantizationPlan, name: str, recipe: Recipe) -> None:
    for converter in plan.quant_converters:
        known = (*CONVERTERS, *EXPERT_CONVERTERS)
        if converter not in known:
            raise ConfigError(
                f"there is no converter '{converter}'",
                key=_CONVERTERS_KEY,
                way_out=f"{did_you_mean(converter, known)}Linear layers are converted ({', '.join(CONVERTERS)}), and "
                f"fused experts ({', '.join(EXPERT_CONVERTERS)}).",
            )
        if converter in EXPERT_CONVERTERS and not recipe.of_experts:
            able = [other for other, its in RECIPES.items() if its.of_experts]
            raise ConfigError(
                f"'{converter}' has no products of experts with the recipe '{name}'",
                key=_CONVERTERS_KEY,
                way_out=f"Set {SECTION}.recipe_name: {', '.join(able)}, or leave it out.",
            )


def _check_settings(plan: QuantizationPlan, name: str, recipe: Recipe) -> None:
    key = f"{SECTION}.extra_args"
    for setting in plan.extra_args:
        if setting not in recipe.settings:
            raise ConfigError(
                f"'{name}' has no setting '{setting}'",
                key=key,
                way_out=f"{did_you_mean(setting, recipe.settings)}It has {', '.join(recipe.settings)}.",
            )
    if plan.extra_args.get("block_size", BLOCK) != BLOCK:
        raise ConfigError(
            f"{plan.extra_args['block_size']}: blocks of '{name}' are {BLOCK} numbers",
            key=f"{key}.block_size",
            way_out="Leave it out.",
        )
    scales = str(plan.extra_args.get("scale_calculation_mode", SCALES[0]))
    if scales.lower() not in SCALES:
        raise ConfigError(
            f"the kernels of '{name}' know no scales by '{scales}'",
            key=f"{key}.scale_calculation_mode",
            way_out=f"There are {', '.join(SCALES)}.",
        )


def _check_device(name: str, recipe: Recipe, *, emulate: bool) -> None:
    if emulate:
        return
    key, device_type = f"{SECTION}.recipe_name", get_device_type()
    way_out = f"Leave the plan out, or set {SECTION}.extra_args.{EMULATE}: true to try the arithmetic, slowly."
    if device_type != "cuda":
        what = "a CPU has" if device_type == "cpu" else f"torchao has for '{device_type}'"
        raise MachineError(f"'{name}' needs 8-bit matrix instructions; {what} none", key=key, way_out=way_out)
    found = device_capability()
    if found < recipe.capability:
        wanted = ".".join(map(str, recipe.capability))
        raise MachineError(
            f"'{name}' needs compute capability {wanted}, this device has {'.'.join(map(str, found))}",
            key=key,
            way_out=way_out,
        )


# --- what is chosen ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """The layers that a plan converts, by name."""

    linears: Linears
    experts: Experts
    left: tuple[str, ...]
    """Linear layers that it leaves out by itself, with the reason."""


def choose_layers(model: nn.Module, plan: QuantizationPlan, recipe: Recipe) -> Chosen:
    """What a plan converts in a model.

    Without patterns: every linear layer but output heads, and those whose sizes do not fit; and all fused experts, if
    their converter is named. Patterns name such layers, which must fit, or modules that hold some, of which those
    linear layers that fit and all experts are taken.

    Raises:
        ConfigError: A pattern names a layer that does not fit or nothing at all, no layer is left, or experts are to be
            converted that cannot be.
    """
    modules = dict(model.named_modules())
    converters = set(plan.quant_converters)
    linears: Linears = {}
    if not converters or converters & set(CONVERTERS):
        linears = {name: module for name, module in modules.items() if type(module) is nn.Linear}
    experts: Experts = {}
    if converters & set(EXPERT_CONVERTERS):
        experts = fused_experts(model)
    names, layers = list(modules), {*linears, *experts}
    ignored = _named_layers(plan.ignored_modules, names, layers, "ignored_modules")
    chosen, head = layers, head_of(model)
    if plan.apply_modules:
        chosen, head = _named_layers(plan.apply_modules, names, layers, "apply_modules"), None
    chosen = chosen - ignored
    kept, left = _fitting_linears({name: linears[name] for name in linears if name in chosen}, head, plan, recipe)
    if converters & set(EXPERT_CONVERTERS):
        experts = {name: module for name, module in experts.items() if name in chosen}
        _check_experts(model, experts, emulate=bool(plan.extra_args.get(EMULATE)))
    elif not kept:
        raise ConfigError(
            f"{type(model).__name__} has no linear layer to convert",
            key=f"{SECTION}.apply_modules",
            way_out="Name some, or leave the plan out.",
        )
    return Chosen(kept, experts, left)


def _fitting_linears(
    chosen: Linears, head: nn.Module | None, plan: QuantizationPlan, recipe: Recipe
) -> tuple[Linears, tuple[str, ...]]:
    """Those of the chosen ones that are converted, and those that are left out."""
    unfit = {name for name, linear in chosen.items() if not _fits(linear, recipe)}
    _check_named(plan.apply_modules, unfit, chosen, recipe)
    kept: Linears = {}
    left = []
    for name, linear in chosen.items():
        if name in unfit:
            left.append(f"{name} (not a multiple of {recipe.multiple})")
        elif linear is head:
            left.append(f"{name} (the output head)")
        else:
            kept[name] = linear
    return kept, tuple(left)


def _fits(linear: nn.Linear, recipe: Recipe) -> bool:
    """Whether the instructions take both sides of a weight."""
    return linear.in_features % recipe.multiple == 0 == linear.out_features % recipe.multiple


def _check_named(patterns: tuple[str, ...], unfit: set[str], linears: Linears, recipe: Recipe) -> None:
    """Raise for a layer that a pattern names itself and whose sizes do not fit."""
    expressions = [compile_pattern(pattern, key=f"{SECTION}.apply_modules") for pattern in patterns]
    for name in sorted(unfit):
        if any(expression.fullmatch(name) for expression in expressions):
            raise ConfigError(
                f"'{name}' is {' × '.join(map(str, linears[name].weight.shape))}, and the instructions take multiples "
                f"of {recipe.multiple}",
                key=f"{SECTION}.apply_modules",
                way_out=f"Add it to {SECTION}.ignored_modules.",
            )


def _check_experts(model: nn.Module, experts: Experts, *, emulate: bool) -> None:
    """Raise for experts that no grouped product of ours computes, or whose sizes its kernels do not take."""
    way_out = f"Leave {', '.join(EXPERT_CONVERTERS)} out."
    if not experts:
        what = "has no experts in fused parameters behind transformers' interface"
        if fused_experts(model):
            what = "has fused experts, but the patterns of the plan take none of them"
        raise ConfigError(f"{type(model).__name__} {what}", key=_CONVERTERS_KEY, way_out=way_out)
    multiple = BLOCK
    if not emulate:
        multiple = GROUP_ROWS
    for name, module in experts.items():
        if has_all(module, "ep_forward"):
            what = f"'{name}' has a forward of its own (ep_forward), which computes its products itself"
            raise ConfigError(what, key=_CONVERTERS_KEY, way_out=way_out)
        for inner, parameter in module.named_parameters(name, recurse=False):
            if parameter.dim() == 3 and any(size % multiple for size in parameter.shape[1:]):
                raise ConfigError(
                    f"'{inner}' holds weights of {' × '.join(map(str, parameter.shape[1:]))}, and the instructions "
                    f"take multiples of {multiple}",
                    key=_CONVERTERS_KEY,
                    way_out=f"Add '{name}' to {SECTION}.ignored_modules, or leave the converter out.",
                )


def _named_layers(patterns: tuple[str, ...], names: list[str], layers: Collection[str], key: str) -> set[str]:
    """Layers that patterns name, or whose holder they name."""
    if not patterns:
        return set()
    matched = resolve_patterns(patterns, names, key=f"{SECTION}.{key}")
    found = {name for name in layers if is_inside(name, matched)}
    if not found:
        raise ConfigError(
            f"'{matched[0]}' holds no linear layer, and no experts that are converted",
            key=f"{SECTION}.{key}",
            way_out="Name modules that hold some.",
        )
    return found


# --- by torchao -------------------------------------------------------------------------------------------------------


def _convert_to_float8(
    model: nn.Module, linears: Linears, recipe: str, settings: Mapping[str, object], *, gathers_low: bool
) -> None:
    """Each becomes a `Float8Linear` with the same parameters."""
    torchao = load_torchao("float8", key=SECTION)
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, enable_fsdp_float8_all_gather=gathers_low, **settings)
    trained = {name: module.weight.requires_grad for name, module in linears.items()}
    torchao.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in linears, config=config)
    for name, requires_grad in trained.items():
        model.get_submodule(name).weight.requires_grad_(requires_grad)
    if gathers_low:
        model.register_state_dict_post_hook(_plain_weights)


def _plain_weights(_module: nn.Module, state: dict[str, object], _prefix: str, _metadata: object) -> None:
    """Checkpoints hold plain tensors, which share their memory with the weights."""
    for name, tensor in list(state.items()):
        inner = _inner_tensor(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        if inner is not None:
            state[name] = _laid_out_like(tensor, inner) if isinstance(tensor, DTensor) else inner


def _laid_out_like(whole: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride(), run_check=False
    )


def _inner_tensor(tensor: object) -> torch.Tensor | None:
    """The plain tensor in one of torchao's weights that know how they are gathered; None for what is plain itself."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return None
    inner: torch.Tensor | None = attribute_at(tensor, "_tensor")
    if inner is None:
        return None
    return inner.detach()
