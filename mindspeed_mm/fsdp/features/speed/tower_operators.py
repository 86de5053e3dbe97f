"""Rotary embeddings of towers by fewer operations, and their norms by torch's own kernel where the device has one.

As for fused kernels, a function or a module is known by what it computes: the library's own is tried on random numbers.
What fused kernels have replaced before stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed_mm.fsdp.features.speed.fused_kernels import norm_eps, norm_variant
from mindspeed_mm.fsdp.models.structure.towers import find_towers
from mindspeed_mm.fsdp.ops.forward_stack import (
    Args,
    Forward,
    ForwardKind,
    Kwargs,
    called_globals,
    global_of,
    rebind_globals,
    replace_forward,
)
from mindspeed_mm.fsdp.ops.layer_operators import plain_norm
from mindspeed_mm.fsdp.ops.rotary_turn import turned


class _RotaryCall(NamedTuple):
    """How a rotary embedding of transformers' towers is called: with cosines and sines behind what is turned."""

    tensors: int
    """How many are turned: queries and keys at once, or one of them."""
    shape: tuple[int, ...]
    """Of a tensor of a trial, heads of 8."""
    heads_dim: int
    """Where its cosines and sines lack the heads, unless the call says otherwise."""
    places: int = 0
    """Tensors behind the cosines and sines: coordinates, one for each part of a head that turns by itself."""


_ROTARY_CALLS = {
    "apply_rotary_pos_emb_vision": _RotaryCall(2, (5, 2, 8), -2),
    "apply_rotary_pos_emb": _RotaryCall(2, (2, 3, 5, 8), 1),
    "apply_multidimensional_rope": _RotaryCall(1, (2, 5, 3, 8), 2, 1),
}


class _Turning(NamedTuple):
    """What `turned` is told to compute the same as a function of the library."""

    parts: int
    is_wide: bool


def apply_tower_operators(model: nn.Module, *, norms: bool) -> None:
    """Replace what can be replaced in a model's towers, in place.

    Args:
        model: Built, parameters on meta or real; call it after fused kernels, before packing and sharding.
        norms: RMS norms, too: one kernel each way on a CUDA device. A CPU has no such kernel.
    """
    for name in dict.fromkeys(tower.module for tower in find_towers(model)):
        fit_tower(model.get_submodule(name), norms=norms)


def fit_tower(tower: nn.Module, *, norms: bool) -> None:
    """The same for one tower."""
    of_norms = _Norms()
    for module in tower.modules():
        if "forward" in vars(module) or type(module).forward is nn.Module.forward:
            continue
        functions = _rotary_functions(module)
        if functions:
            rebind_globals(module, functions)
        elif norms and (forward := of_norms.forward_of(module)) is not None:
            replace_forward(module, ForwardKind.KERNEL, forward)


# --- rotary embeddings ------------------------------------------------------------------------------------------------


def _rotary_functions(module: nn.Module) -> dict[str, Forward]:
    """Name that a module calls → what takes its place."""
    found = {}
    for name in called_globals(module) & _ROTARY_CALLS.keys():
        by_library = global_of(module, name)
        turning = _turning_of(by_library, name)
        if turning is not None:
            found[name] = _turning_function(by_library, name, turning)
    return found


@functools.cache
def _turning_function(by_library: Forward, name: str, turning: _Turning) -> Forward:
    """One for all modules that call the same function: layers share their compiled graphs."""
    call = _ROTARY_CALLS[name]

    @functools.wraps(by_library)
    def turn(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_understood(call, turning, args, kwargs):
            return by_library(*args, **kwargs)
        cos, sin = args[call.tensors : call.tensors + 2]
        heads_dim = kwargs.get("unsqueeze_dim", call.heads_dim)
        found = [turned(x, cos, sin, heads_dim=heads_dim, **turning._asdict()) for x in args[: call.tensors]]
        if call.tensors == 1:
            return found[0]
        return tuple(found)

    return turn


def _is_understood(call: _RotaryCall, turning: _Turning, args: Args, kwargs: Kwargs) -> bool:
    """Whether a call has the arguments that were tried: whole heads, angles without gradients, a coordinate a part."""
    if len(args) != call.tensors + 2 + call.places or not kwargs.keys() <= {"unsqueeze_dim"}:
        return False
    cos, sin, *places = args[call.tensors :]
    if cos.requires_grad or sin.requires_grad or any(each.shape[-1] != turning.parts for each in places):
        return False
    return all(x.shape[-1] == cos.shape[-1] == sin.shape[-1] for x in args[: call.tensors])


@functools.cache
def _turning_of(by_library: Forward, name: str) -> _Turning | None:
    """What computes the same to the bit; None where nothing does."""
    return next(
        (
            turning
            for turning in (_Turning(parts, is_wide) for parts in (1, 2) for is_wide in (False, True))
            if _computes_the_same(by_library, name, turning)
        ),
        None,
    )


@torch.no_grad()
def _computes_the_same(by_library: Forward, name: str, turning: _Turning) -> bool:
    call, other = _ROTARY_CALLS[name], _turning_function(by_library, name, turning)
    generator = torch.Generator().manual_seed(0)
    heads_dim = call.heads_dim % len(call.shape)
    angles_shape = (*call.shape[:heads_dim], *call.shape[heads_dim + 1 :])
    for dtype, of_angles in ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)):
        tensors = [torch.randn(call.shape, generator=generator).to(dtype) for _ in range(call.tensors)]
        angles = [torch.randn(angles_shape, generator=generator).to(of_angles) for _ in range(2)]
        args = (*tensors, *angles, *[torch.zeros(*angles_shape[:-1], 2)] * call.places)
        if not _is_understood(call, turning, args, {}):  # the library's own would be compared with itself
            return False
        try:
            wanted, found = (each(*args) for each in (by_library, other))
        except (TypeError, RuntimeError, ValueError):  # it takes something else
            return False
        if call.tensors == 1:
            wanted, found = (wanted,), (found,)
        pairs = zip(wanted, found, strict=True)
        if not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs):
            return False
    return True


# --- norms ------------------------------------------------------------------------------------------------------------


class _Norms:
    """What takes the place of forwards of RMS norms; those of one kind are tried once."""

    def __init__(self) -> None:
        self._known: dict[tuple[type, float, bool], Callable[[Any, Tensor], Tensor] | None] = {}

    def forward_of(self, module: nn.Module) -> Forward | None:
        """None for anything but an RMS norm."""
        kind = type(module), norm_eps(module), bool(module._parameters)
        if kind not in self._known:
            self._known[kind] = _norm_function(module)
        function = self._known[kind]
        if function is None:
            return None
        return MethodType(function, module)


def _norm_function(module: nn.Module) -> Callable[[Any, Tensor], Tensor] | None:
    """(norm, (…, H)) → (…, H), in the type of the input."""
    eps = norm_eps(module)
    if _is_bare_norm(module):
        return lambda self, x: F.rms_norm(x, x.shape[-1:], eps=eps)
    variant = norm_variant(module)
    if variant == (0.0, True):
        return lambda self, x: self.weight * F.rms_norm(x, x.shape[-1:], eps=eps)
    if variant == (0.0, False):
        return functools.partial(_rounded_last, eps=eps)
    return None


def _rounded_last(self: Any, x: Tensor, *, eps: float) -> Tensor:
    if self.weight.dtype != x.dtype:  # the kernel takes one type
        return plain_norm(x, self.weight, eps, 0.0, False)
    return F.rms_norm(x, x.shape[-1:], self.weight, eps)


@torch.no_grad()
def _is_bare_norm(module: nn.Module) -> bool:
    """Whether it is an RMS norm without a weight."""
    if norm_eps(module) < 0 or module._parameters or module._modules:
        return False
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    try:
        output = module(x)
    except (TypeError, RuntimeError, ValueError, AttributeError):
        return False
    wanted = plain_norm(x, torch.ones(8, dtype=x.dtype), norm_eps(module), 0.0, False)
    return isinstance(output, Tensor) and torch.equal(output, wanted)
