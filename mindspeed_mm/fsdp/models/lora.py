"""Low-rank adapters by PEFT (Hu et al. 2021: y = W·x + alpha / rank · B·A·x) on a model that has no weights yet.

`apply_lora` stands right behind `ModelHub.build`, before any plan and before sharding; `initialize_lora` behind the
loading of the base model's weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.patterns import resolve_patterns
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.core.suggest import nearest
from mindspeed_mm.fsdp.models.construction import set_dtypes
from mindspeed_mm.fsdp.models.local_shard import local_pieces
from mindspeed_mm.fsdp.models.lora_files import load_adapters
from mindspeed_mm.fsdp.models.lora_names import ADAPTER, LoraReport, is_adapter_weight, lora_of, split_adapter_weight
from mindspeed_mm.fsdp.models.ties import shared_parameters
from mindspeed_mm.fsdp.params.lora_args import LoraArguments

__all__ = ["LoraReport", "apply_lora", "initialize_lora", "lora_of"]

_TARGETS = "training.lora.target_modules"
_WHOLE = "training.lora.modules_to_save"


def apply_lora(
    model: nn.Module,
    lora: LoraArguments,
    *,
    default_targets: Sequence[str] = (),
    param_dtype: torch.dtype | None = None,
) -> LoraReport:
    """Give linear layers an adapter and freeze everything else, in place. Layers that are frozen already
    (`model.freeze`) get none.

    Args:
        model: From `ModelHub.build`. The adapters' parameters are on the meta device.
        lora: The `training.lora` section.
        default_targets: Patterns that stand in for `target_modules` where it has its default, which names the layers
            of language models: `DiffusionAdapter.lora_targets`.
        param_dtype: What the plan computes in. The base model is kept in it, what is trained in fp32.

    Raises:
        ConfigError: A pattern matches nothing, or no linear layer that may be trained; or a layer shares its weight
            with another one.
    """
    if any(name.endswith(".base_layer") for name, _ in model.named_modules()):
        raise ConfigError("the model has adapters already, or layers of that name", key="training.lora.enable")
    whole = _modules_to_save(model, lora.modules_to_save)
    if whole and hasattr(model, "_mm_adapter"):
        raise ConfigError(
            f"{', '.join(whole)}: diffusers' pipelines load adapters only",
            key=_WHOLE,
            way_out="Name linear layers of it in target_modules instead.",
        )
    targets = _target_layers(model, _patterns(lora, default_targets), whole)
    _check_ties(model, targets, whole)
    peft_targets = _for_peft(targets, [name for name, _ in model.named_modules() if name])
    _inject(model, lora, targets)
    for name in whole:
        model.get_submodule(name).requires_grad_(True)
    set_dtypes(model, param_dtype)
    report = LoraReport(
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        initialisation=lora.init_lora_weights,
        targets=tuple(targets),
        peft_targets=peft_targets,
        modules_to_save=tuple(whole),
        trained=frozenset(_trained_names(model, whole)),
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
    )
    model._mm_lora = report  # type: ignore[assignment]
    return report


@torch.no_grad()
def initialize_lora(model: nn.Module, lora: LoraArguments, seed: int) -> None:
    """Give the adapters their first values, the same under every plan: those of a file, or new ones as PEFT draws them
    (A uniform in ±1/√inputs, or normal with deviation 1/rank for `gaussian`; B zero, unless `init_lora_weights` is
    false). The parameters have memory; the base model's weights may be loaded or not.

    Raises:
        ModelFolderError: The files of `pretrained_lora_path` are missing, damaged, or of other adapters.
    """
    for name, parameter in model.named_parameters():
        if is_adapter_weight(name):
            values = _first_values(name, parameter, lora.init_lora_weights, seed)
            for piece, region in local_pieces(parameter):
                piece.copy_(values[tuple(slice(start, start + length) for start, length in region)])
    if lora.pretrained_lora_path is not None:
        load_adapters(model, lora.pretrained_lora_path)


def _first_values(name: str, parameter: torch.Tensor, initialisation: bool | str, seed: int) -> torch.Tensor:
    _, side = split_adapter_weight(name) or ("", "")
    values = torch.zeros(parameter.shape)
    generator = torch.Generator().manual_seed(derive_seed(seed, name))
    if side == "B" and initialisation is not False:
        return values
    if initialisation == "gaussian":
        return values.normal_(std=1 / parameter.shape[0], generator=generator)
    return nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)


# --- which modules ----------------------------------------------------------------------------------------------------


def _patterns(lora: LoraArguments, default_targets: Sequence[str]) -> Sequence[str]:
    """A resolved configuration spells defaults out: that nothing was named shows in the value alone."""
    is_default = lora.target_modules == LoraArguments.model_fields["target_modules"].default
    return default_targets if default_targets and is_default else lora.target_modules


def _modules_to_save(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The outermost of the modules that the patterns name."""
    if not patterns:
        return []
    names = resolve_patterns(patterns, [n for n, _ in model.named_modules()], key=_WHOLE, allow_suffix=True)
    return [name for name in names if not _is_inside(name, names)]


def _target_layers(model: nn.Module, patterns: Sequence[str], whole: Sequence[str]) -> list[str]:
    modules = dict(model.named_modules())
    layers = [name for name, module in modules.items() if name and _is_linear(module)]
    frozen = {name for name in layers if not modules[name].weight.requires_grad}  # type: ignore[union-attr]
    resolve_patterns(patterns, modules, key=_TARGETS, allow_suffix=True)
    chosen: set[str] = set()
    problems: list[Problem] = []
    for pattern in patterns:
        matched = resolve_patterns([pattern], modules, key=_TARGETS, allow_suffix=True)
        found = {name for name in matched if name in layers}
        chosen |= found - frozen
        if not found - frozen:
            problems.append(_no_layer(pattern, matched, sorted(found), layers))
    problems += [
        Problem(f"'{name}' is trained whole, as {_WHOLE} says", key=_TARGETS, way_out="Name it in one of them only.")
        for name in sorted(chosen)
        if name in whole or _is_inside(name, whole)
    ]
    if problems:
        raise ConfigError(f"{_TARGETS}: {len(problems)} problem(s)", problems=problems)
    return [name for name in layers if name in chosen]


def _is_linear(module: nn.Module) -> bool:
    # torch's attention reads the weight of its output layer without calling it: an adapter there would do nothing.
    return isinstance(module, nn.Linear) and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)


def _no_layer(pattern: str, matched: Sequence[str], frozen: Sequence[str], layers: Sequence[str]) -> Problem:
    if frozen:
        return Problem(
            f"'{pattern}' matches only layers that model.freeze freezes ({frozen[0]} …)",
            key=_TARGETS,
            way_out="Take it out, or free them in model.freeze.",
        )
    near = [name for name in layers if _is_inside(name, matched)] or nearest(matched[0], layers, most=3)
    return Problem(
        f"'{pattern}' matches {len(matched)} module(s), none of them a linear layer ({matched[0]} …)",
        key=_TARGETS,
        way_out=f"Linear layers there: {', '.join(near[:3])}." if near else "",
    )


def _check_ties(model: nn.Module, targets: Sequence[str], whole: Sequence[str]) -> None:
    """A shared weight with an adapter at one of its places could not be merged; one that is trained whole at one place
    only would be another one there for whoever reads the files."""
    for group in shared_parameters(model):
        homes = [name.rpartition(".")[0] for name in group]
        if adapted := [home for home in homes if home in targets]:
            others = ", ".join(f"'{home}'" for home in homes if home != adapted[0])
            raise ConfigError(
                f"'{adapted[0]}' shares its weight with {others}",
                key=_TARGETS,
                way_out="Leave it out: its adapter could not be merged.",
            )
        trained = [home for home in homes if home in whole or _is_inside(home, whole)]
        if trained and len(trained) < len(homes):
            others = ", ".join(f"'{home}'" for home in homes if home not in trained)
            raise ConfigError(
                f"'{trained[0]}' shares its weight with {others}", key=_WHOLE, way_out="Name all of them, or none."
            )


def _is_inside(name: str, parents: Collection[str]) -> bool:
    return any(name.startswith(f"{parent}.") for parent in parents)


def _trained_names(model: nn.Module, whole: Sequence[str]) -> list[str]:
    kept = dict(model.named_buffers())
    state = model.state_dict(keep_vars=True)
    return [
        *(name for name, parameter in model.named_parameters() if parameter.requires_grad),
        *(name for name in state if name in kept and _is_inside(name, whole)),
    ]


# --- PEFT -------------------------------------------------------------------------------------------------------------


def _inject(model: nn.Module, lora: LoraArguments, targets: Sequence[str]) -> None:
    from peft import LoraConfig, inject_adapter_in_model  # half a second to import

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=lora.dropout,
        # An expression and no list: in a list a name also stands for every name that ends in it.
        target_modules="|".join(re.escape(name) for name in targets),
    )
    inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)


def _for_peft(targets: Sequence[str], names: Sequence[str]) -> tuple[str, ...] | str:
    """The shortest ends of names that stand for the targets and for nothing else; an expression where a target's whole
    name is the end of another one."""
    longest = max(name.count(".") for name in targets) + 1
    for parts in range(1, longest + 1):
        ends = {".".join(name.split(".")[-parts:]) for name in targets}
        suffixes = tuple(f".{end}" for end in ends)
        if {name for name in names if name in ends or name.endswith(suffixes)} == set(targets):
            return tuple(sorted(ends))
    return "|".join(re.escape(name) for name in targets)
