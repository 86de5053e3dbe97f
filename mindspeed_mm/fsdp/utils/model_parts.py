"""Questions about a live model whose class may lack what is asked for, each asked in one place.

Which parameters several modules share is read off the live model, too: a configuration flag says less than the tie.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn


def attribute_at(holder: object, key: str, absent: Any = None) -> Any:
    """An attribute of a model or a configuration, by a dotted key such as `config.vision_config.patch_size`.

    Args:
        holder: Where the key begins.
        key: Names joined by dots.
        absent: The answer where something on the way, or the attribute itself, is missing or None.
    """
    value: Any = holder
    for name in key.split("."):
        value = getattr(value, name, None)
        if value is None:
            return absent
    return value


def has_all(holder: object, *names: str) -> bool:
    """Whether an object has all of these attributes, whatever their values."""
    return all(hasattr(holder, name) for name in names)


def first_of(holder: object, *names: str) -> str:
    """The first of these attributes that an object has; empty when it has none of them."""
    return next((name for name in names if hasattr(holder, name)), "")


def decoder_of(model: nn.Module) -> nn.Module | None:
    """The module that takes token embeddings through the layers, where the model's class names one."""
    return _part(model, "get_decoder")


def embedding_of(model: nn.Module) -> nn.Module | None:
    """The module that turns tokens into embeddings, where the model's class names one."""
    return _part(model, "get_input_embeddings")


def head_of(model: nn.Module) -> nn.Module | None:
    """The module that turns hidden states into logits, where the model's class names one."""
    return _part(model, "get_output_embeddings")


def _part(model: nn.Module, getter: str) -> nn.Module | None:
    get = getattr(model, getter, None)
    if get is None:
        return None
    try:
        part = get()
    except (AttributeError, NotImplementedError):  # how transformers says that there is none
        return None
    return part if isinstance(part, nn.Module) else None


def module_names(model: nn.Module) -> list[str]:
    """Names of all modules of a model, the empty one of the model itself first."""
    return [name for name, _ in model.named_modules()]


def name_of(model: nn.Module, part: nn.Module | None) -> str:
    """The name of a module inside a model; empty for the model itself and for what is not in it."""
    for name, module in model.named_modules():
        if module is part:
            return name
    return ""


def base_layer_of(module: nn.Module) -> nn.Module:
    """The layer that an adapter is put on; a module without an adapter is returned as it is."""
    base: nn.Module = getattr(module, "base_layer", module)
    return base


def weight_of(module: nn.Module) -> torch.Tensor:
    """The weight of a layer, under an adapter or not."""
    weight = base_layer_of(module).weight
    assert isinstance(weight, torch.Tensor)
    return weight


def shared_parameters(model: nn.Module) -> list[list[str]]:
    """Groups of two or more names of one parameter; the first is the one that `named_parameters()` gives."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def tie_groups(model: nn.Module) -> list[list[str]]:
    """Groups of module names that share a parameter, to be sharded together."""
    groups: list[set[str]] = []
    for names in shared_parameters(model):
        joined = {name.rpartition(".")[0] for name in names}
        apart = []
        for group in groups:
            if group.isdisjoint(joined):
                apart.append(group)
            else:  # modules that share two parameters with different others belong together as well
                joined |= group
        groups = [*apart, joined]
    order = list(dict(model.named_modules(remove_duplicate=False)))
    return [sorted(group, key=order.index) for group in groups if len(group) > 1]


def tie(model: nn.Module, groups: list[list[str]]) -> None:
    """Let the names of each group hold the first name's parameter again, after moving parameters set them apart."""
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for name in others:
            module_name, _, parameter_name = name.rpartition(".")
            module = model.get_submodule(module_name)
            if module._parameters[parameter_name] is not parameter:
                module._parameters[parameter_name] = parameter
