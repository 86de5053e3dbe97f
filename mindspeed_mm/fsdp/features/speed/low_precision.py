"""Linear layers whose matrix products run in 8-bit floats, forward and backward, by torchao (`quantization_plan`).

Weights stay in the masters' type, and so do optimizer states and checkpoints: what is rounded are the operands of each
product, with scales found anew each time (Micikevicius et al. 2022, arXiv:2209.05433; microscaling formats:
Rouhani et al. 2023, arXiv:2310.10537). No parameter changes its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.core.patterns import compile_pattern, is_inside, resolve_patterns
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.ops.forward_stack import ForwardKind, replace_forward
from mindspeed_mm.fsdp.params.training_args import QuantizationPlan
from mindspeed_mm.fsdp.utils.device import device_capability, get_device_type
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, head_of
from mindspeed_mm.fsdp.utils.torchao_library import load_torchao

SECTION = "training.quantization_plan"
EMULATE = "emulate"
"""The setting of `extra_args` that does the same arithmetic without the device's instructions."""


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


_FLOAT8 = ("pad_inner_dim", "round_scales_to_power_of_2", EMULATE)
_MX = ("wgrad_with_hp", "scale_calculation_mode", "block_size", EMULATE)
_BLOCK = 32
"""Numbers that share a scale: the format's one size."""
RECIPES: Mapping[str, Recipe] = {
    "tensorwise": Recipe((8, 9), 16, True, _FLOAT8),
    "rowwise": Recipe((8, 9), 16, False, _FLOAT8),
    "rowwise_with_gw_hp": Recipe((8, 9), 16, False, _FLOAT8),
    "mxfp8": Recipe((10, 0), _BLOCK, False, _MX),
}
ALIASES = {"fp8": "tensorwise", "float8": "tensorwise", "mx": "mxfp8"}
CONVERTERS = ("linear", "quantize.linear.float8", "quantize.linear.mx")
"""Names for the one thing that is converted: linear layers."""
EXPERT_CONVERTERS = ("quantize.moe.mx",)
"""Names for grouped products of experts, which are computed in the plan's type: taken beside those of linear layers."""

_SHOWN = 4
"""Layers that the log names."""

Linears = dict[str, nn.Linear]


@dataclass(frozen=True)
class LowPrecision:
    """What was converted, for the log."""

    recipe: str
    layers: int
    left: tuple[str, ...]
    """What is asked for and left out, with the reason."""
    gathers_low: bool

    def __str__(self) -> str:
        gathered = "8 bits" if self.gathers_low else "the plan's type"
        described = f"{self.recipe}, {self.layers} linear layers, weights gathered in {gathered}"
        if self.left:
            described += f"; left as they are: {', '.join(self.left[:_SHOWN])}"
        if len(self.left) > _SHOWN:
            described += " …"
        return described


def apply_low_precision(model: nn.Module, plan: QuantizationPlan | None) -> None:
    """Let linear layers compute in 8 bits, in place; nothing without a plan. `facts_of(model)` says what was done.

    Args:
        model: Whole, before it is split or sharded; adapters are refused by the rules of the configuration.
        plan: `training.quantization_plan`.

    Raises:
        ConfigError: An unknown recipe, converter or setting; a pattern that matches no linear layer; a layer whose
            sizes the instructions do not take.
        MachineError: The device has no such instructions, or torchao is not installed.
    """
    if plan is None or plan.recipe_name is None:
        return
    name, recipe = check_plan(plan)
    linears, left = linears_of(model, plan, recipe)
    gathers_low = recipe.gathers_low and plan.enable_fsdp_low_precision_all_gather
    if set(plan.quant_converters) & set(EXPERT_CONVERTERS):
        left = ("grouped products of experts (not converted)", *left)
    if name == "mxfp8":
        _convert_to_mx(linears, plan.extra_args)
    else:
        _convert_to_float8(model, linears, name, plan.extra_args, gathers_low=gathers_low)
    facts_of(model).note(LowPrecision(name, len(linears), left, gathers_low))


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
    of_linears = set(plan.quant_converters) & set(CONVERTERS)
    for converter in plan.quant_converters:
        if converter not in CONVERTERS and not (converter in EXPERT_CONVERTERS and of_linears):
            raise ConfigError(
                f"there is no converter '{converter}'",
                key=f"{SECTION}.quant_converters",
                way_out=f"Linear layers are converted ({', '.join(CONVERTERS)}); leave it out.",
            )
    for setting in plan.extra_args:
        if setting not in recipe.settings:
            raise ConfigError(
                f"'{name}' has no setting '{setting}'",
                key=f"{SECTION}.extra_args",
                way_out=f"{did_you_mean(setting, recipe.settings)}It has {', '.join(recipe.settings)}.",
            )
    if plan.extra_args.get("block_size", _BLOCK) != _BLOCK:
        raise ConfigError(
            f"{plan.extra_args['block_size']}: blocks of '{name}' are {_BLOCK} numbers",
            key=f"{SECTION}.extra_args.block_size",
            way_out="Leave it out.",
        )
    _check_device(asked, recipe, emulate=bool(plan.extra_args.get(EMULATE)))
    return name, recipe


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


def linears_of(model: nn.Module, plan: QuantizationPlan, recipe: Recipe) -> tuple[Linears, tuple[str, ...]]:
    """The layers that a plan converts, and those that it leaves out by itself.

    Without patterns: every linear layer but output heads, and those whose sizes do not fit. Patterns name linear
    layers, which must fit, or modules that hold some, of which those that fit are taken.

    Raises:
        ConfigError: A pattern names a layer that does not fit or nothing at all, or no layer is left.
    """
    modules = dict(model.named_modules())
    linears = {name: module for name, module in modules.items() if type(module) is nn.Linear}
    ignored = _named_linears(plan.ignored_modules, list(modules), linears, "ignored_modules")
    unfit = {name for name, linear in linears.items() if not _fits(linear, recipe)}
    chosen, head = set(linears), head_of(model)
    if plan.apply_modules:
        chosen, head = _named_linears(plan.apply_modules, list(modules), linears, "apply_modules"), None
        _check_named(plan.apply_modules, chosen & unfit - ignored, linears, recipe)
    kept: Linears = {}
    left = []
    for name, linear in linears.items():
        if name not in chosen or name in ignored:
            continue
        if name in unfit:
            left.append(f"{name} (not a multiple of {recipe.multiple})")
        elif linear is head:
            left.append(f"{name} (the output head)")
        else:
            kept[name] = linear
    if not kept:
        raise ConfigError(
            f"{type(model).__name__} has no linear layer to convert",
            key=f"{SECTION}.apply_modules",
            way_out="Name some, or leave the plan out.",
        )
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


def _named_linears(patterns: tuple[str, ...], names: list[str], linears: Linears, key: str) -> set[str]:
    """Linear layers that patterns name, or whose holder they name."""
    if not patterns:
        return set()
    matched = resolve_patterns(patterns, names, key=f"{SECTION}.{key}")
    found = {name for name in linears if is_inside(name, matched)}
    if not found:
        raise ConfigError(
            f"'{matched[0]}' holds no linear layer", key=f"{SECTION}.{key}", way_out="Name modules that hold some."
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


def _convert_to_mx(linears: Linears, settings: Mapping[str, object]) -> None:
    """Forward on the instance: torchao's own conversion replaces the parameters by tensors that lose the bias."""
    product = load_torchao("prototype.moe_training.mxfp8_linear", key=SECTION)._to_mxfp8_then_scaled_mm
    formats = load_torchao("prototype.mx_formats.config", key=SECTION)
    kernels = load_torchao("quantization.quantize_.common.kernel_preference", key=SECTION).KernelPreference
    preference = kernels.EMULATED if settings.get(EMULATE) else kernels.AUTO
    mode = formats.ScaleCalculationMode[str(settings.get("scale_calculation_mode", "rceil")).upper()]
    options = (preference, mode, bool(settings.get("wgrad_with_hp", False)))
    for module in linears.values():
        replace_forward(module, ForwardKind.LOW_PRECISION, MxForward(module, product, options))


class MxForward:
    """The forward pass of a linear layer whose products are microscaled.

    Args:
        module: The layer.
        product: torchao's, `(input, weight, *options)`.
        options: Kernels, rounding of scales, and whether the gradient of the weight stays exact.
    """

    def __init__(self, module: nn.Module, product: Callable[..., torch.Tensor], options: tuple[object, ...]) -> None:
        self._module, self._product, self._options = module, product, options

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """(…, out) of (…, in). Rows are filled up to blocks of 32: the gradient of the weight sums over them."""
        rows = input.reshape(-1, input.shape[-1])
        filled = nn.functional.pad(rows, (0, 0, 0, -len(rows) % _BLOCK))
        output = self._product(filled, self._module.weight, *self._options)[: len(rows)]
        output = output.reshape(*input.shape[:-1], output.shape[-1])
        if self._module.bias is not None:
            output = output + self._module.bias.to(output.dtype)
        return output


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
