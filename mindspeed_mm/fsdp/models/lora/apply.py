"""Low-rank adapters by PEFT (Hu et al. 2021: y = W·x + alpha / rank · B·A·x) on a model that has no weights yet.

`apply_lora` stands right behind `ModelHub.build`, before any plan and before sharding; `initialize_lora` behind the
loading of the base model's weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.patterns import is_inside
from mindspeed_mm.fsdp.models.behaviour.quantized_linear import quantize_linears
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.construction import set_dtypes
from mindspeed_mm.fsdp.models.lora.experts import adapt_experts
from mindspeed_mm.fsdp.models.lora.files import load_adapters
from mindspeed_mm.fsdp.models.lora.first_values import check_rank, set_first_values, take_from_base
from mindspeed_mm.fsdp.models.lora.injection import inject, inject_frozen, load_frozen, peft_names, shortest_ends
from mindspeed_mm.fsdp.models.lora.names import LoraReport, is_adapter_weight
from mindspeed_mm.fsdp.models.lora.targets import LoraTargets, resolve_targets
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.utils.model_parts import module_names, weight_of

__all__ = ["LoraReport", "apply_lora", "initialize_lora", "take_from_base"]


def apply_lora(
    model: nn.Module,
    lora: LoraArguments,
    *,
    param_dtype: torch.dtype | None = None,
) -> LoraReport:
    """Give layers an adapter and freeze everything else, in place. Layers that are frozen already (`model.freeze`) get
    none.

    Args:
        model: From `ModelHub.build`. The adapters' parameters are on the meta device.
        lora: The `training.lora` section.
        param_dtype: What the plan computes in. The base model is kept in it, what is trained in fp32.

    Raises:
        ConfigError: A pattern matches nothing, or nothing that may be trained; a layer shares its weight with another
            one; or the section asks for what its targets cannot have.
    """
    if any(name.endswith(".base_layer") for name in module_names(model)):
        raise ConfigError("the model has adapters already, or layers of that name", key="training.lora.enable")
    targets = resolve_targets(model, lora)
    _check_kind(lora, targets)
    shapes = {name: weight_of(model.get_submodule(name)).shape for name in targets.layers}
    check_rank(lora.init_lora_weights, shapes, lora.rank)
    # Before PEFT adds its levels: files name layers as the base model does.
    names = module_names(model)[1:]
    parameter_names = [name for name, _ in model.named_parameters()]
    frozen = inject_frozen(model, lora.frozen_adapters)
    inject(model, lora, targets)
    adapt_experts(model)
    for name in targets.whole:
        model.get_submodule(name).requires_grad_(True)
    for name in targets.token_rows:
        model.get_parameter(name).requires_grad_(True)
    # Behind all `requires_grad`: what is trained is kept in the masters' type, the rest is not.
    set_dtypes(model, param_dtype)
    if lora.quantize is not None:
        quantize_linears(model, lora.quantize)
    report = LoraReport(
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        initialisation=lora.init_lora_weights,
        targets=tuple(targets.layers),
        peft_targets=peft_names(targets.layers, names),
        parameters_targeted=tuple(targets.parameters),
        peft_parameters=_ends_of(targets.parameters, parameter_names),
        strengths=targets.strengths,
        use_dora=lora.use_dora,
        modules_to_save=tuple(targets.whole),
        frozen=frozen,
        quantize=lora.quantize,
        token_rows=targets.token_rows,
        trained=frozenset(_trained_names(model, targets.whole)),
        parameters=sum(_trained_numbers(model, targets.token_rows)),
    )
    facts_of(model).lora = report
    return report


@torch.no_grad()
def initialize_lora(model: nn.Module, lora: LoraArguments, seed: int, *, fresh: bool = True, folder: str = "") -> None:
    """Give the adapters their first values, the same under every plan: those of a file, or new ones as PEFT makes them.
    The parameters have memory and the base model's weights are loaded.

    Args:
        model: Sharded or not.
        lora: The `training.lora` section.
        seed: Of the run.
        fresh: False: a checkpoint will fill what is trained; only what lies frozen under it is loaded.
        folder: Where the base model's weights came from.

    Raises:
        ModelFolderError: The files of `pretrained_lora_path` or `frozen_adapters` are missing, damaged, or of other
            adapters.
    """
    load_frozen(model)
    if fresh and lora.pretrained_lora_path is not None:
        load_adapters(model, lora.pretrained_lora_path)
    elif fresh:
        set_first_values(model, lora.init_lora_weights, seed, Path(folder) if folder else None)


def _trained_numbers(model: nn.Module, token_rows: Mapping[str, Sequence[int]]) -> Iterator[int]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rows = token_rows.get(name)
            yield parameter.numel() if rows is None else parameter[0].numel() * len(rows)


def _check_kind(lora: LoraArguments, targets: LoraTargets) -> None:
    """Raise `ConfigError` for what fused experts cannot have: their adapter is added to the weight, not to the output,
    and PEFT has these for layers only."""
    if not targets.parameters:
        return
    on = f"target_modules names fused experts ({targets.parameters[0]} …)"
    problems: list[Problem] = []
    if lora.dropout:
        problems.append(Problem(f"{lora.dropout}, but {on}", key="training.lora.dropout", way_out="Set it to 0."))
    if lora.use_dora:
        problems.append(Problem(f"true, but {on}", key="training.lora.use_dora", way_out="Set it to false."))
    if lora.init_lora_weights not in (True, False, "gaussian"):
        way_out = "Take true, false or gaussian."
        problems.append(
            Problem(f"'{lora.init_lora_weights}', but {on}", key="training.lora.init_lora_weights", way_out=way_out)
        )
    if problems:
        raise ConfigError("adapters on fused experts cannot have all that linear layers can", problems=problems)


def _ends_of(parameters: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """For PEFT, with the module's name: it is read off them which modules hold experts."""
    if not parameters:
        return ()
    return shortest_ends(parameters, names, least=2) or tuple(parameters)


def _trained_names(model: nn.Module, whole: Sequence[str]) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name
    buffers = dict(model.named_buffers())
    for name in model.state_dict(keep_vars=True):  # which has the persistent ones among them
        if name in buffers and (is_inside(name, whole) or is_adapter_weight(name)):
            yield name
