"""What adapters start with, the same under every plan.

A and B that depend on nothing but their shapes are drawn from a generator seeded by the parameter's name. What depends
on the base weight is made by PEFT itself, on one whole layer at a time: the first rank that holds a part of the weight
makes it and gives it to the others. What the adapter starts with, PiSSA, OLoRA and CorDA take out of the base weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.models.behaviour.quantized_linear import QuantizedLayout, packings_of, rounded
from mindspeed_mm.fsdp.models.loading.local_shard import copy_whole, local_tensor, whole_tensor
from mindspeed_mm.fsdp.models.loading.stream import stored_weights
from mindspeed_mm.fsdp.models.lora.experts import wrappers_of
from mindspeed_mm.fsdp.models.lora.names import (
    ADAPTER,
    INITIAL,
    MAGNITUDE,
    AdaptedLinear,
    adapter_weight,
    moves_base,
    split_adapter_weight,
)
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, has_all

_KEY = "training.lora.init_lora_weights"
FROM_DATA = ("eva", "corda")
"""Initialisations that look at data before the first step: `calibration.py`."""


class Started(NamedTuple):
    """What one layer starts with."""

    a: torch.Tensor
    """(rank, inputs)."""
    b: torch.Tensor
    """(outputs, rank)."""


def set_first_values(model: nn.Module, initialisation: bool | str, seed: int, folder: Path | None = None) -> None:
    """Fill the trained adapters, as PEFT does it, and take what they start with out of the base weights.

    A uniform in ±1/√inputs, or normal with deviation 1/rank for `gaussian`; B zero, unless `initialisation` is false.
    The others see `made_by_peft`. EVA and CorDA start as `true` does, and get their values from data later.

    Args:
        model: With weights, sharded or not. Called by all ranks.
        initialisation: `training.lora.init_lora_weights`.
        seed: Of the run.
        folder: Of the base weights, which `loftq` compares with what became of them.
    """
    drawn: bool | str = True
    if initialisation in (False, "gaussian"):
        drawn = initialisation
    ranks = _ranks(model)
    for name, parameter in model.named_parameters():
        layer, side = split_adapter_weight(name) or ("", MAGNITUDE)
        if side != MAGNITUDE:
            copy_whole(parameter, _drawn(name, side, parameter.shape, ranks.get(layer), drawn, seed))
    if initialisation == "loftq":
        assert folder is not None, "the base weights come from no folder"
        _start_loftq(model, folder)
    elif isinstance(initialisation, str) and initialisation not in ("gaussian", *FROM_DATA):
        for name, adapted in adapted_layers(model):
            weight = adapted.base_layer.weight
            if initialisation == "orthogonal":
                weight = torch.empty(weight.shape)  # orthogonal matrices depend on nothing but shapes
            else:
                weight = whole_tensor(weight)
            make = partial(made_by_peft, weight, adapted, initialisation, derive_seed(seed, name))
            start_layer(adapted, from_first_rank(adapted, make), moves=moves_base(initialisation))
    set_magnitudes(model)


def _start_loftq(model: nn.Module, folder: Path) -> None:
    """Adapters that make up for what quantising took away: the largest directions of W − Q(W), the first step of LoftQ
    (Li et al. 2023, arXiv:2310.08659, algorithm 1). PEFT leaves out the division by the scale, and is right for 1."""
    packings = packings_of(model)
    with stored_weights(model, folder) as weights:
        for name, layer in adapted_layers(model):
            packing = packings.get(f"{name}.weight")
            if packing is not None:
                started = from_first_rank(layer, partial(_loftq, weights[f"{name}.weight"], layer, packing))
                start_layer(layer, started, moves=False)


def _loftq(stored: LazyTensor, layer: AdaptedLinear, packing: QuantizedLayout) -> Started:
    weight, rank = stored.read().float(), layer.r[ADAPTER]
    u, s, vh = torch.linalg.svd(weight - rounded(weight, packing), full_matrices=False)
    # The forward pass multiplies B·A by the scale, so it is divided out of the singular values.
    root = (s[:rank] / layer.scaling[ADAPTER]).sqrt()
    return Started(root[:, None] * vh[:rank], u[:, :rank] * root)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """Linear layers with the trained adapter, by name."""
    for name, module in model.named_modules():
        wraps_parameter = has_all(module, "parameter_name")  # of experts
        if has_all(module, "base_layer") and not wraps_parameter and ADAPTER in attribute_at(module, "lora_A"):
            yield name, cast(AdaptedLinear, module)


def start_layer(layer: AdaptedLinear, started: Started, *, moves: bool) -> None:
    """Give a layer's adapter its values.

    Args:
        layer: With the trained adapter.
        started: On all ranks alike.
        moves: Take scale · B·A out of the base weight, and note it.
    """
    copy_whole(layer.lora_A[ADAPTER].weight, started.a)
    copy_whole(layer.lora_B[ADAPTER].weight, started.b)
    if moves:
        for buffer, values in zip(INITIAL, started, strict=True):
            layer.get_buffer(buffer).copy_(values)
        _take(layer)


def take_from_base(model: nn.Module) -> None:
    """Take out of the base weights what the adapters started with, once a checkpoint has brought it: the base of a run
    that goes on comes from its folder again."""
    for _, layer in adapted_layers(model):
        if has_all(layer, *INITIAL):
            _take(layer)


def _take(layer: AdaptedLinear) -> None:
    """W − scale · B·A, rounded once, of whole matrices: the same bits under every plan."""
    weight = layer.base_layer.weight
    a, b = map(layer.get_buffer, INITIAL)
    wide = torch.promote_types(weight.dtype, torch.float32)
    whole = whole_tensor(weight)
    copy_whole(weight, whole.to(wide) - layer.scaling[ADAPTER] * (b.to(wide) @ a.to(wide)))


def set_magnitudes(model: nn.Module) -> None:
    """DoRA (Liu et al. 2024, equation 5): the length of each row of W + scale · B·A, with which y stays as it is."""
    for name, layer in adapted_layers(model):
        if ADAPTER in layer.lora_magnitude_vector:
            magnitude = model.get_parameter(adapter_weight(name, MAGNITUDE))
            weight = whole_tensor(layer.base_layer.weight)
            wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
            a = whole_tensor(layer.lora_A[ADAPTER].weight).to(wide)
            b = whole_tensor(layer.lora_B[ADAPTER].weight).to(wide)
            copy_whole(magnitude, torch.linalg.norm(wide + layer.scaling[ADAPTER] * (b @ a), dim=1))


def made_by_peft(
    weight: torch.Tensor, layer: AdaptedLinear, initialisation: str, seed: int, **marks: object
) -> Started:
    """What PEFT starts a layer with: pissa, pissa_niter_N (Meng et al. 2024), olora (Büyükakyüz 2024), orthogonal,
    corda (Yang et al. 2024).

    Args:
        weight: (outputs, inputs), the whole one.
        layer: Whose adapter it is: rank and scale.
        initialisation: PEFT's name.
        seed: Of what is drawn.
        marks: Attributes that PEFT looks for on the layer.

    Raises:
        ConfigError: The rank does not fit the layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    holder = nn.Module()
    base = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    base.weight = nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)  # what PEFT computes in
    holder.layer = base
    for name, value in marks.items():
        setattr(base, name, value)
    config = LoraConfig(
        r=layer.r[ADAPTER],
        lora_alpha=layer.lora_alpha[ADAPTER],
        init_lora_weights=initialisation,  # type: ignore[arg-type]
        target_modules=["layer"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, holder, adapter_name=ADAPTER)
    made: Any = holder.layer
    return Started(made.lora_A[ADAPTER].weight.detach(), made.lora_B[ADAPTER].weight.detach())


def check_rank(initialisation: bool | str, shapes: Mapping[str, torch.Size], rank: int) -> None:
    """Raise `ConfigError` for a rank that an initialisation cannot have: PEFT would say so in the middle of a run, or
    give adapters of another shape.

    Args:
        initialisation: `training.lora.init_lora_weights`.
        shapes: Of the weights by layer.
        rank: Of the adapters.
    """
    if initialisation == "orthogonal" and rank % 2:
        raise ConfigError(
            f"'orthogonal', but the rank is {rank}", key=_KEY, way_out="Choose an even training.lora.rank."
        )
    if initialisation in (True, False, "gaussian", "orthogonal"):
        return
    least = {layer: min(shape) for layer, shape in shapes.items()}
    smallest = min(least, key=least.__getitem__, default=None)
    if smallest is not None and least[smallest] < rank:
        raise ConfigError(
            f"'{initialisation}' takes {rank} directions of each weight, and {smallest} is {list(shapes[smallest])}",
            key=_KEY,
            way_out=f"Set training.lora.rank to {least[smallest]} or less, or leave this layer out.",
        )


# --- details ----------------------------------------------------------------------------------------------------------


def _ranks(model: nn.Module) -> dict[str, int]:
    """Layer with adapters on fused experts → the rank of one expert's."""
    wrappers = chain.from_iterable(wrappers_of(model).values())
    return {name: wrapper.r[ADAPTER] for name, wrapper in wrappers}


def _drawn(
    name: str, side: str, shape: torch.Size, rank: int | None, initialisation: bool | str, seed: int
) -> torch.Tensor:
    values = torch.zeros(shape)
    generator = torch.Generator().manual_seed(derive_seed(seed, name))
    if side == "B" and initialisation is not False:
        return values
    if initialisation == "gaussian":
        return values.normal_(std=1 / (rank or shape[0]), generator=generator)
    # With a = √5 its bound is 1 / √inputs.
    return nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)


def from_first_rank(layer: AdaptedLinear, make: Callable[[], Started]) -> Started:
    """What `make` gives on the first of the ranks that hold a part of the layer, on all of them: decompositions may
    differ in signs between machines, and every rank keeps a part."""
    parameter = layer.base_layer.weight
    mesh = None
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
    is_first = mesh is None or not any(mesh.get_coordinate() or ())
    if is_first:
        a, b = make()
    else:
        a, b = torch.empty(layer.lora_A[ADAPTER].weight.shape), torch.empty(layer.lora_B[ADAPTER].weight.shape)
    device = local_tensor(parameter).device
    started = Started(a.to(device, torch.float32).contiguous(), b.to(device, torch.float32).contiguous())
    if mesh is not None:
        for axis in range(mesh.ndim):  # along one axis after the other, the values reach every rank
            for tensor in started:
                dist.broadcast(tensor, group=mesh.get_group(axis), group_src=0)
    return started
