"""PEFT's part: its layers are put into a model, by names as they are."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mindspeed_mm.fsdp.models.lora.names import ADAPTER, INITIAL, moves_base
from mindspeed_mm.fsdp.models.lora.targets import LoraTargets
from mindspeed_mm.fsdp.params.lora_args import LoraArguments


def inject(model: nn.Module, lora: LoraArguments, targets: LoraTargets) -> None:
    """Put the trained adapter into a model; its parameters are on the meta device, everything else is frozen.

    Where the base will give away what the adapter starts with, the layer gets two buffers for it: a run that goes on
    takes it out again, and the adapter can be written as one of the untouched base.
    """
    inject_adapter(
        model,
        ADAPTER,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_dora=lora.use_dora,
        target_modules=expression_of(targets.layers),
        target_parameters=targets.parameters or None,
        rank_pattern={end: strength.rank for end, strength in targets.strengths.items()},
        alpha_pattern={end: strength.alpha for end, strength in targets.strengths.items()},
    )
    for name in targets.layers if moves_base(lora.init_lora_weights) else ():
        layer: Any = model.get_submodule(name)
        for buffer, side in zip(INITIAL, (layer.lora_A, layer.lora_B), strict=True):
            layer.register_buffer(buffer, torch.zeros(side[ADAPTER].weight.shape))


def inject_adapter(model: nn.Module, name: str, **settings: Any) -> None:
    """Put an adapter into a model, beside those that are there: all of them are active.

    Args:
        model: Parameters on meta or real.
        name: Of the adapter.
        settings: Of PEFT's `LoraConfig`.
    """
    from peft import LoraConfig, inject_adapter_in_model  # half a second to import
    from peft.tuners.lora import LoraLayer

    with _names_as_they_are(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # of the adapters that lie under this one
        inject_adapter_in_model(LoraConfig(**settings), model, adapter_name=name, low_cpu_mem_usage=True)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.set_adapter(list(module.lora_A))
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(f".{ADAPTER}." in parameter_name)


@contextmanager
def _names_as_they_are() -> Iterator[None]:
    """Inside, PEFT reads no names of older models into a configuration.

    For models with fused experts, PEFT 0.19 to 0.21 takes `gate_proj` and the like for the fused parameters, and of an
    expression only the last names that it matches: adapters on one layer would land on all of them. Which of the two is
    meant, `disable_peft_moe_conversion` has said already.
    """
    from peft.utils import transformers_weight_conversion as conversion

    replaced = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *args, **kwargs: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = replaced


def expression_of(names: Sequence[str]) -> str | list[str]:
    """What stands for just these modules: an expression, as in a list a name also stands for every name that ends in
    it."""
    return "|".join(re.escape(name) for name in names) if names else []


def peft_names(targets: Sequence[str], names: Sequence[str]) -> tuple[str, ...] | str:
    """What stands for just these modules in a configuration of PEFT: the shortest ends of their names; an expression
    where a target's whole name is the end of another one.

    Args:
        targets: Names of modules.
        names: Those of all modules.
    """
    found = shortest_ends(targets, names) if targets else ()
    return found if found is not None else "|".join(re.escape(name) for name in targets)


def shortest_ends(targets: Sequence[str], names: Sequence[str], least: int = 1) -> tuple[str, ...] | None:
    """Ends of names, of at least so many parts, that stand for the targets and for nothing else; None where a target's
    whole name is the end of another one."""
    longest = max(name.count(".") for name in targets) + 1
    for parts in range(least, longest + 1):
        ends = {".".join(name.split(".")[-parts:]) for name in targets}
        suffixes = tuple(f".{end}" for end in ends)
        if {name for name in names if name in ends or name.endswith(suffixes)} == set(targets):
            return tuple(sorted(ends))
    return None
