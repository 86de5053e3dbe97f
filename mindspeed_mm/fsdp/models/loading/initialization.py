"""Weights from scratch that do not depend on the parallel plan.

Unit by unit, every rank makes the full tensors on the CPU with a generator seeded by (seed, module name), runs the
model's own initialisation on them, keeps its shard and drops the rest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.models.base_model import WeightInitMixin
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.local_shard import local_pieces

Unit = list[tuple[str, nn.Module]]
"""Modules with their names, made in one go; children stand before their parents."""


@torch.no_grad()
def initialize(model: nn.Module, *, seed: int, units: Sequence[str], names: Collection[str] | None = None) -> list[str]:
    """Initialise parameters in place; they have memory already.

    A module's weights come from `_init_weights(module)` of the nearest model around it (transformers' convention), or
    from a generator's adapter, then from a plugin's own `init_weights()`; what they leave alone from torch's
    `reset_parameters()`.

    Args:
        model: The model, sharded or not.
        seed: Of the run.
        units: Names of modules made in one go, e.g. decoder layers; memory peaks at the largest. Others go one by one.
        names: Only these parameters; the others keep their values. All when None.

    Returns:
        The names of the parameters that were initialised.

    Raises:
        ModelFolderError: The model's code leaves a parameter unset.
    """
    waiting = {id(p): name for name, p in model.named_parameters() if names is None or name in names}
    setters, opaque = _setters(model), _opaque_models(model)
    initialized = []
    for unit in _units(model, [*opaque, *units]):
        if not any(id(p) in waiting for _, module in unit for p in module._parameters.values()):
            continue
        with _full_tensors(unit) as tensors:
            _run(unit, setters, opaque, seed)
            for parameter, tensor in tensors:
                if name := waiting.pop(id(parameter), ""):
                    _check_set(name, tensor)
                    _keep_shard(parameter, tensor)
                    initialized.append(name)
    return initialized


def _units(model: nn.Module, units: Sequence[str]) -> Iterator[Unit]:
    """Disjoint units that hold every module with parameters. A module stands together with children that have none of
    their own: embeddings set the weights of theirs, which must be whole for it."""
    taken: set[str] = set()
    for root in units:
        unit = [(name, module) for name, module in _post_order(model.get_submodule(root), root) if name not in taken]
        taken.update(name for name, _ in unit)
        yield unit
    for name, module in model.named_modules():
        unit = list(_post_order(module, name))
        has_leaves = len(unit) == 1 + len(list(module.children())) > 1
        if has_leaves and not any(inside in taken for inside, _ in unit):
            taken.update(inside for inside, _ in unit)
            yield unit
    for name, module in _post_order(model):
        if name not in taken and module._parameters:
            yield [(name, module)]


def _opaque_models(model: nn.Module) -> list[str]:
    """Outermost modules whose `init_weights()` sets everything below them and cannot be taken apart."""
    found: list[str] = []
    for name, module in model.named_modules():
        per_module = getattr(type(module), "_init_weights", WeightInitMixin._init_weights)
        is_opaque = hasattr(module, "init_weights") and per_module is WeightInitMixin._init_weights
        if is_opaque and not any(not outer or name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def _post_order(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _post_order(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def _setters(model: nn.Module) -> dict[str, Callable[[nn.Module], None]]:
    """Module name → what sets its weights: `_init_weights` of the nearest model around it, or of itself."""
    adapter = facts_of(model).adapter
    setters: dict[str, Callable[[nn.Module], None]] = {"": adapter.init_weights} if adapter is not None else {}
    for name, module in model.named_modules():
        parent = setters.get(name.rpartition(".")[0])
        if hasattr(module, "_init_weights"):
            setters[name] = module._init_weights
        elif parent is not None:
            setters[name] = parent
    return setters


@contextmanager
def _full_tensors(unit: Unit) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
    """Inside, the unit's modules hold full fp32 tensors, NaN until set. Yields pairs (own parameter, full tensor)."""
    places = [(m, name, p) for _, m in unit for name, p in m._parameters.items() if p is not None]
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
    dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
    fill = math.nan if parameter.is_floating_point() else 0
    return nn.Parameter(torch.full(parameter.shape, fill, dtype=dtype), requires_grad=False)


def _run(unit: Unit, setters: Mapping[str, Callable[[nn.Module], None]], opaque: Collection[str], seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        for name, module in unit:
            torch.manual_seed(_derive(seed, name))
            if name in setters:
                setters[name](module)
            if name in opaque:
                module.init_weights()  # type: ignore[operator]
            for method in ("reset_parameters", "_reset_parameters"):
                if _is_unset(module) and hasattr(module, method):
                    getattr(module, method)()


def _is_unset(module: nn.Module) -> bool:
    return any(bool(p.isnan().any()) for p in module.parameters(recurse=False))


def _derive(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _check_set(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() and bool(tensor.isnan().any()):
        raise ModelFolderError(
            "the model's code does not initialise this parameter",
            key=name,
            way_out="Set it in `_init_weights(module)` of the model, or in `reset_parameters()` of its module.",
        )


def _keep_shard(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    for piece, region in local_pieces(parameter):
        piece.copy_(tensor[tuple(slice(start, start + length) for start, length in region)])
