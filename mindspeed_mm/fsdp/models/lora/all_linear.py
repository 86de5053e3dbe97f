"""Which layers `target_modules` means by a word instead of by names: `all-linear`, and what nothing is set for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from mindspeed_mm.core.patterns import is_inside
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.lora.files import AdapterFile
from mindspeed_mm.fsdp.models.structure.towers import find_towers
from mindspeed_mm.fsdp.ops.experts import is_fused
from mindspeed_mm.fsdp.params.lora_args import OLDER_DEFAULT, LoraArguments
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, decoder_of, head_of, name_of, shared_parameters

ALL_LINEAR = frozenset({"all-linear", "all"})
"""The word of PEFT and ms-swift, and that of LLaMA-Factory."""
_MOST = 12


def takes_adapter(module: nn.Module) -> bool:
    """Whether PEFT can give a module the adapter of a linear layer."""
    # torch's attention reads the weight of its output layer without calling it: an adapter there would do nothing.
    return isinstance(module, nn.Linear) and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)


def asked_patterns(model: nn.Module, lora: LoraArguments) -> tuple[str, ...]:
    """`target_modules`, or what an unset one means: the layers that are adapted in `pretrained_lora_path`, those of a
    generator's family, else `all-linear`."""
    adapter = facts_of(model).adapter
    if lora.target_modules == OLDER_DEFAULT and adapter is not None:
        # A run of an older version spelled its default out, and meant the attention layers by it.
        return adapter.older_lora_targets or adapter.lora_targets
    if lora.target_modules is not None:
        return lora.target_modules
    if lora.pretrained_lora_path is not None and (stored := _adapted_in(model, Path(lora.pretrained_lora_path))):
        return stored
    if adapter is None:
        return ("all-linear",)
    return (*adapter.lora_targets, *adapter.more_lora_targets.get(adapter.task, ()))


def _adapted_in(model: nn.Module, path: Path) -> tuple[str, ...]:
    """The layers and fused parameters that a file has adapters for; none where the model lacks one of them."""
    modules, found = dict(model.named_modules()), dict[str, None]()
    for file in AdapterFile.find_all(path):
        stored = file.adapter()
        if not all(layer in modules for layer in stored.layers):
            return ()
        found |= dict.fromkeys((*stored.layers, *(stored.settings.get("target_parameters") or ())))
    return tuple(found)


def all_linear(model: nn.Module) -> list[str]:
    """The linear layers of the language model, as PEFT's `all-linear` finds those of a model of text
    (`_maybe_include_all_linear_layers`, PEFT 0.19): without the output head, and without routers, which choose experts.
    Towers of images and sounds, and what joins them to the decoder, are left out. Of a generator: all of its
    transformer."""
    inside = _language_model(model)
    left_out = [name.rpartition(".")[0] for group in shared_parameters(model) for name in group]
    left_out += [name for name, module in model.named_modules() if module is head_of(model) or is_router(model, name)]
    if facts_of(model).adapter is None:
        left_out += [tower.module for tower in find_towers(model)]
    found = []
    for name, module in model.named_modules():
        is_there = not inside or is_inside(name, (inside,))
        if is_there and takes_adapter(module) and not is_inside(name, left_out):
            found.append(name)
    return found


def _language_model(model: nn.Module) -> str:
    """Name of the module that takes embeddings of tokens through the layers; empty where it is not known, or is the
    model itself."""
    decoder = decoder_of(model)
    if decoder is None or attribute_at(model, "config.is_encoder_decoder", False):
        return ""
    return name_of(model, decoder)


def is_router(model: nn.Module, name: str) -> bool:
    """Whether a linear layer next to experts weighs them: it has a number for each expert, or one for a shared one."""
    parent, layer = model.get_submodule(name.rpartition(".")[0]), model.get_submodule(name)
    experts = parent._modules.get("experts")
    if experts is None or not isinstance(layer, nn.Linear):
        return False
    count = attribute_at(experts, "num_experts") if is_fused(experts) else _length(experts)
    return layer.out_features in (1, count)


def _length(experts: nn.Module) -> int:
    if isinstance(experts, nn.ModuleList | nn.ModuleDict):
        return len(experts)
    return 0


def told_linear_layers(names: Sequence[str]) -> str:
    """The different last names of linear layers, for messages."""
    ends = dict.fromkeys(name.rpartition(".")[2] for name in names)
    shown = [end for end in ends if not end.isdigit()] or list(ends)
    more = f" and {len(shown) - _MOST} more" if len(shown) > _MOST else ""
    return f"{', '.join(shown[:_MOST])}{more}"
