"""Questions about live models, configurations and processors of other libraries, which may lack what is asked for or
have it under several names: each asked in one place.

Which parameters several modules share is read off the live model, too: a configuration flag says less than the tie.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # light paths ask for settings, and do without torch
    import torch
    from torch import nn
    from transformers import PreTrainedConfig


def attribute_at(holder: object, key: str, absent: object = None) -> Any:
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
    return _declared_part(model, "get_decoder")


def embedding_of(model: nn.Module) -> nn.Module | None:
    """The module that turns tokens into embeddings, where the model's class names one."""
    return _declared_part(model, "get_input_embeddings")


def head_of(model: nn.Module) -> nn.Module | None:
    """The module that turns hidden states into logits, where the model's class names one."""
    return _declared_part(model, "get_output_embeddings")


def _declared_part(model: nn.Module, getter: str) -> nn.Module | None:
    get = getattr(model, getter, None)
    if get is None:
        return None
    try:
        part = get()
    except (AttributeError, NotImplementedError):  # how transformers says that there is none
        return None
    if hasattr(part, "named_parameters"):
        return part
    return None


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
    weight: torch.Tensor = base_layer_of(module).weight
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


Kind = TypeVar("Kind")


def setting_of(holder: object, kind: type[Kind], *names: str) -> Kind | None:
    """The first of these attributes whose value is of this kind; None where the object has none of them."""
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, kind):
            return value
    return None


_STRETCHED = ("linear", "dynamic", "yarn")


def longest_of(config: PreTrainedConfig) -> int | None:
    """Positions of the language model, question and answer together; None where its configuration does not say.

    Rotary positions that are stretched by a factor reach further than `max_position_embeddings`, which some
    configurations keep as it was trained: counted is what vLLM counts.
    """
    text = config.get_text_config()
    longest = attribute_at(text, "max_position_embeddings")
    if not longest:
        return None
    rope = attribute_at(text, "rope_parameters", {})
    if rope.get("rope_type") in _STRETCHED and rope.get("factor"):
        trained = rope.get("original_max_position_embeddings") or longest
        return max(int(longest), int(trained * rope["factor"]))
    return int(longest)


def rope_border(config: PreTrainedConfig) -> int | None:
    """Positions up to which rows of a pass do not change one another's rotary frequencies; None where they never do.

    transformers takes those of `dynamic` and `longrope` from the largest position of the whole batch.
    """
    text = config.get_text_config()
    rope = attribute_at(text, "rope_parameters", {}) or {}
    of_layer_types = [value for value in rope.values() if isinstance(value, dict)]
    borders = []
    for each in (rope, *of_layer_types):
        if "dynamic" in str(each.get("rope_type")):
            borders.append(int(text.max_position_embeddings))
        elif each.get("rope_type") == "longrope":
            borders.append(int(each.get("original_max_position_embeddings") or text.max_position_embeddings))
    return min(borders, default=None)
