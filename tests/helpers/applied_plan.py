"""Compares what was done to a model with what its plan says, read off the live modules and parameters."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from mindspeed_mm.core.patterns import is_inside
from mindspeed_mm.fsdp.features.memory.recompute import RecomputedForward
from mindspeed_mm.fsdp.ops.forward_stack import ForwardKind, forwards_of

CUTS = {"colwise": 0, "colwise_gather_output": 0, "embedding_rowwise": 0, "rowwise": 1}
"""Style → the dimension of a weight that tensor parallelism cuts."""


def check_applied(assembled: Any) -> None:
    """Raise `AssertionError` where the model is another one than its plan describes."""
    plan, applied = assembled.plan.parallel, assembled.applied
    if hasattr(applied.model, "fully_shard"):
        return  # the model shards itself: what it does with the plan is its own affair
    assert (applied.pipeline is not None) == (plan.stages is not None)
    assert (applied.context is not None) == (plan.context is not None)
    assert (applied.media is not None) == (plan.towers is not None)
    assert (applied.towers is not None) == bool(assembled.plan.idle)
    assert (applied.head is not None) == (assembled.plan.head is not None)
    roots = {"": applied.model} if applied.pipeline is None else dict(enumerate(applied.pipeline.stages))
    for root in roots.values():
        prefix = "" if applied.pipeline is None else "model."
        held = {name.removeprefix(prefix) for name, module in root.named_modules() if _is_here(module)}
        wrapped, wanted = _wrapped(root, prefix), _to_be_wrapped(plan, held)
        assert wrapped == wanted, f"{type(root).__name__}: {wrapped ^ wanted} are only in one of model and plan"
        for name, parameter in root.named_parameters():
            _check_cuts(plan, name.removeprefix(prefix), parameter)
        _check_features(assembled.plan.features, root, prefix)


def _check_features(plan: Any, root: nn.Module, prefix: str) -> None:
    """The forwards that features have replaced are those of the modules that the plan names."""
    modules = {name.removeprefix(prefix): module for name, module in root.named_modules() if _is_here(module)}
    for names, *kinds in (
        (plan.recomputed, ForwardKind.RECOMPUTE),
        (plan.offloaded, ForwardKind.OFFLOAD),
        (plan.waiting, ForwardKind.WEIGHTS),
        (plan.sliced, ForwardKind.SLICES),
        (plan.compiled, ForwardKind.COMPILE, ForwardKind.COMPILE_RECOMPUTED),
    ):
        wanted = {name for name in names if name in modules}
        done = {name for name, module in modules.items() if any(each.kind in kinds for each in forwards_of(module))}
        if ForwardKind.COMPILE in kinds:  # what reads the device inside a compiled block stays out of its graph
            done = {name for name in done if not is_inside(name, done, strict=True)}
        assert done == wanted, f"{kinds[0]}: {done ^ wanted} are only in one of model and plan"
    divided = {name for name, module in modules.items() if _divides_inputs(module)}
    assert divided == {name for name in plan.distributed if name in modules}


def _divides_inputs(module: nn.Module) -> bool:
    """Whether a module is recomputed of inputs that tensor ranks divide among them."""
    forwards = [module.forward, *(each.own for each in forwards_of(module))]
    return any(isinstance(each, RecomputedForward) and each._inputs is not None for each in forwards)


def _is_here(module: nn.Module) -> bool:
    """False for what stands in the place of another stage's module: it has no parameters."""
    return next(module.parameters(), None) is not None


def _wrapped(root: nn.Module, prefix: str) -> set[str]:
    wrapped = {name for name, module in root.named_modules() if isinstance(module, FSDPModule)}
    return {name.removeprefix(prefix) for name in wrapped}


def _to_be_wrapped(plan: Any, held: set[str]) -> set[str]:
    if not plan.sharding.is_sharded:
        return set()
    units = {name for unit in plan.sharding.units for name in unit.names}
    return (units | set(plan.sharding.experts) | set(plan.sharding.copies)) & held | {""}


def _check_cuts(plan: Any, name: str, parameter: nn.Parameter) -> None:
    """A parameter is cut over the axes, and along the dimensions, that the plan says."""
    cuts = _cuts_of(parameter)
    module, _, last = name.rpartition(".")
    rule = plan.tensor.cuts.get(module) if plan.tensor is not None else None
    if rule is not None and not rule.blocks and rule.style.value in CUTS:
        dim = CUTS[rule.style.value]
        assert cuts.get("tp") == (None if last == "bias" and dim else dim), f"{name}: {cuts}"
    else:
        assert "tp" not in cuts, f"{name}: {cuts}"
    is_expert = any(name.startswith(f"{each}.") for each in plan.sharding.experts)
    assert ("ep" in cuts) == is_expert, f"{name}: {cuts}"
    if plan.sharding.is_sharded and name in plan.sharding.cut_dims:
        assert plan.sharding.cut_dims[name] in cuts.values(), f"{name}: {cuts}"


def _cuts_of(parameter: nn.Parameter) -> dict[str, int]:
    """Axis of the mesh → the dimension that is cut over it."""
    if not isinstance(parameter, DTensor):
        return {}
    axes = parameter.device_mesh.mesh_dim_names or ()
    placed = zip(axes, parameter.placements, strict=True)
    return {axis: placement.dim for axis, placement in placed if isinstance(placement, Shard)}
