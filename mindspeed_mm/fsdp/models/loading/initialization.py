"""Weights from scratch that do not depend on the parallel plan.

Unit by unit, every rank makes the full tensors on the CPU with a generator seeded by (seed, module name), runs the
model's own initialisation on them, keeps its shard and drops the rest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.patterns import is_inside
from mindspeed_mm.fsdp.models.base_model import WeightInitMixin
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.local_shard import copy_whole
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, has_all

_DIFFUSERS_NORMS = "diffusers.models.normalization"
"""Where diffusers has norms that torch has not, or has not had."""
Setter = Callable[[nn.Module], None]
"""Sets the weights of one module."""
Unit = list[tuple[str, nn.Module]]
"""Modules with their names, made in one go; children stand before their parents."""


@torch.no_grad()
def initialize(model: nn.Module, *, seed: int, units: Sequence[str], names: Collection[str] | None = None) -> list[str]:
    """Initialise parameters, and buffers that a checkpoint holds, in place; they have memory already.

    A module's weights come from `_init_weights(module)` of the nearest model around it (transformers' convention), or
    from a generator's adapter, then from a plugin's own `init_weights()`; what they leave alone from torch's
    `reset_parameters()`. diffusers' own norms, which have none, begin as the identity. Buffers that none of them sets
    keep what the model was built with.

    Args:
        model: The model, sharded or not.
        seed: Of the run.
        units: Names of modules made in one go, e.g. decoder layers; memory peaks at the largest. Others go one by one.
        names: Only these parameters and buffers; the others keep their values. All when None.

    Returns:
        The names of the parameters that were initialised.

    Raises:
        ModelFolderError: The model's code leaves a parameter unset.
    """
    every = chain(model.named_parameters(), persistent_buffers(model))
    waiting = {id(tensor): name for name, tensor in every if names is None or name in names}
    setters, opaque = _setters(model), _opaque_models(model)
    initialized = []
    for unit in _units(model, [*opaque, *units]):
        parameters = chain.from_iterable(module.parameters(recurse=False) for _, module in unit)
        buffers = [buffer for _, module in unit for _, buffer in _own_persistent(module)]
        if waiting.keys().isdisjoint(map(id, chain(parameters, buffers))):
            continue
        kept = [buffer for buffer in buffers if id(buffer) not in waiting]
        with _full_tensors(unit) as tensors, _unchanged(kept):
            _run(unit, setters, opaque, seed)
            for parameter, tensor in tensors:
                name = waiting.pop(id(parameter), "")
                if name:
                    _check_set(name, tensor)
                    copy_whole(parameter, tensor)
                    initialized.append(name)
    return initialized


def _units(model: nn.Module, units: Sequence[str]) -> Iterator[Unit]:
    """Disjoint units that hold every module with parameters or buffers that are stored. A module stands together with
    children that have none of their own: embeddings set the weights of theirs, which must be whole for it."""
    taken: set[str] = set()
    for root in units:
        unit = [(name, module) for name, module in _post_order(model.get_submodule(root), root) if name not in taken]
        taken.update(dict(unit))
        yield unit
    for name, module in model.named_modules():
        unit = list(_post_order(module, name))
        children = len(list(module.children()))
        all_are_leaves = len(unit) == 1 + children
        if children and all_are_leaves and taken.isdisjoint(dict(unit)):
            taken.update(dict(unit))
            yield unit
    for name, module in _post_order(model):
        if name not in taken and (module._parameters or _own_persistent(module)):
            yield [(name, module)]


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that a checkpoint holds, each under all of its names."""
    for prefix, module in model.named_modules():
        for name, buffer in _own_persistent(module):
            yield f"{prefix}.{name}" if prefix else name, buffer


def _own_persistent(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = module.named_buffers(recurse=False, remove_duplicate=False)
    return [(name, buffer) for name, buffer in named if name not in module._non_persistent_buffers_set]


@contextmanager
def _unchanged(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Afterwards, these tensors hold what they held before."""
    before = [tensor.clone() for tensor in tensors]
    yield
    for tensor, values in zip(tensors, before, strict=True):
        tensor.copy_(values)


def _opaque_models(model: nn.Module) -> list[str]:
    """Outermost modules whose `init_weights()` sets everything below them and cannot be taken apart."""
    found: list[str] = []
    for name, module in model.named_modules():
        per_module = attribute_at(type(module), "_init_weights", WeightInitMixin._init_weights)
        is_opaque = has_all(module, "init_weights") and per_module is WeightInitMixin._init_weights
        lies_within = "" in found or is_inside(name, found)
        if is_opaque and not lies_within:
            found.append(name)
    return found


def _post_order(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _post_order(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def _setters(model: nn.Module) -> dict[str, Setter]:
    """Module name → what sets its weights: `_init_weights` of the nearest model around it, or of itself."""
    adapter = facts_of(model).adapter
    setters: dict[str, Setter] = {}
    if adapter is not None:
        setters[""] = adapter.init_weights
    for name, module in model.named_modules():
        around = setters.get(name.rpartition(".")[0])
        own: Setter | None = attribute_at(module, "_init_weights", around)
        if own is not None:
            setters[name] = own
    return setters


@contextmanager
def _full_tensors(unit: Unit) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
    """Inside, the unit's modules hold full fp32 tensors, NaN until set. Yields pairs (own parameter, full tensor)."""
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for _, module in unit:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.append((module, name, parameter))
    pairs: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module, name, parameter in places:
        if id(parameter) not in pairs:
            pairs[id(parameter)] = (parameter, _unset(parameter))
        module._parameters[name] = pairs[id(parameter)][1]
    try:
        yield list(pairs.values())
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


def _unset(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.is_floating_point():
        unset = torch.full(parameter.shape, math.nan, dtype=torch.float32)
    else:
        unset = torch.zeros(parameter.shape, dtype=parameter.dtype)
    return nn.Parameter(unset, requires_grad=False)


def _run(unit: Unit, setters: Mapping[str, Setter], opaque: Collection[str], seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        for name, module in unit:
            torch.manual_seed(_derive(seed, name))
            if name in setters:
                setters[name](module)
            if name in opaque:
                module.init_weights()  # type: ignore[operator]
            for method in ("reset_parameters", "_reset_parameters"):
                reset = attribute_at(module, method)
                if reset is not None and _is_unset(module):
                    reset()
            if type(module).__module__ == _DIFFUSERS_NORMS and _is_unset(module):
                _set_identity(module)


def _set_identity(norm: nn.Module) -> None:
    """A norm that scales by one and adds nothing."""
    for name, parameter in norm.named_parameters(recurse=False):
        parameter.fill_(1.0 if name == "weight" else 0.0)


def _is_unset(module: nn.Module) -> bool:
    return any(bool(p.isnan().any()) for p in module.parameters(recurse=False))


def _derive(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # fits a signed 64-bit integer


def _check_set(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() and bool(tensor.isnan().any()):
        raise ModelFolderError(
            "the model's code does not initialise this parameter",
            key=name,
            way_out="Set it in `_init_weights(module)` of the innermost model around it, the one that is asked, or in "
            "`reset_parameters()` of its module.",
        )
