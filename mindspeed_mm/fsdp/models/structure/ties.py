"""Parameters that several modules share, read off the live model: a configuration flag says less than the tie."""

from __future__ import annotations

from collections import defaultdict

from torch import nn


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
