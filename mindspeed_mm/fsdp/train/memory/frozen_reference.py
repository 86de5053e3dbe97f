"""What the frozen reference of post-training holds on a rank."""

from __future__ import annotations

import torch

from mindspeed_mm.fsdp.models.loading.construction import set_dtypes
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.posttrain import has_moving_reference, reference_kind
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes
from mindspeed_mm.fsdp.plan.resolve import resolve_plan
from mindspeed_mm.fsdp.tools.memory_model.static_part import HeldUnit, held_units
from mindspeed_mm.fsdp.train.reference_start import reference_outline, reference_start
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype


def frozen_reference_bytes(arguments: Arguments, sizes: ParallelSizes) -> int:
    """Bytes of its shards, and of the units that stay gathered behind its forward pass: there is no backward pass, in
    front of which they would be cut again. 0 where there is no such reference.

    Raises:
        ConfigError: It cannot be built.
    """
    if reference_kind(arguments) != "frozen" or has_moving_reference(arguments.posttrain):
        return 0
    start = reference_start(arguments)
    outline = reference_outline(arguments)
    outline.model.requires_grad_(False)
    compute = torch_dtype(arguments.parallel.fsdp_plan.param_dtype)
    set_dtypes(outline.model, compute)
    plan = resolve_plan(outline, start, sizes, trains=False)
    units = held_units(outline.model, plan.parallel)
    reshards = plan.parallel.sharding.section.reshard_after_forward is not False
    held = sum(buffer.numel() * buffer.element_size() for buffer in outline.model.buffers())
    for unit in units:
        held += sum(parameter.bytes for parameter in unit.parameters)
        if unit.shards > 1 and not (reshards and _is_cut_again(unit)):
            held += _whole_bytes(unit, compute)
    return held


def _is_cut_again(unit: HeldUnit) -> bool:
    """The root, and modules that are gathered together, stay whole until the backward pass."""
    return len(unit.names) == 1 and unit.names[0] != ""


def _whole_bytes(unit: HeldUnit, compute: torch.dtype | None) -> int:
    return sum(parameter.padded_numel * (compute or parameter.dtype).itemsize for parameter in unit.parameters)
