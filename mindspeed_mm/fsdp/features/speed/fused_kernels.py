"""RMS norms, rotary embeddings and gated linear units by fused kernels, in place of a model's own operations.

A module is known by what it computes, not by its name: its own forward is tried on random numbers, and is replaced
where it gives what the plain formula gives. No parameter changes its name, and no library is patched.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.features.speed.choice import FUSED_KEY, SpeedChoice
from mindspeed_mm.fsdp.features.speed.fused_operators import FusedOperators, fused_operators
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.ops.forward_stack import (
    Forward,
    ForwardKind,
    called_globals,
    global_of,
    rebind_globals,
    replace_forward,
)
from mindspeed_mm.fsdp.ops.layer_operators import plain_norm, plain_rotary
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

ROTARY = "apply_rotary_pos_emb"
"""What transformers' attention layers call."""
_GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")


@dataclass(frozen=True)
class FusedKernels:
    """What was chosen and replaced: a fact of the model, for the log."""

    choice: SpeedChoice
    counts: Mapping[str, int]
    """Operation → modules."""

    def __str__(self) -> str:
        replaced = [f"{number} {name}" for name, number in self.counts.items() if number]
        if replaced:
            return f"{', '.join(replaced)} by {self.choice}"
        return str(self.choice)


def apply_fused_kernels(model: nn.Module, choice: SpeedChoice, *, is_wish: bool = False) -> None:
    """Replace what can be replaced, in place; `FusedKernels` in `facts_of(model)` says what.

    Args:
        model: Built, parameters on meta or real; call it before packing, adapters' first values and sharding.
        choice: Of `choose_fused`.
        is_wish: Whether the configuration asks for it: a model that has nothing to replace is then an error.

    Raises:
        MachineError: The package lacks an operator.
        ConfigError: The model has nothing to replace, and the configuration asks for it.
    """
    counts: dict[str, int] = {}
    if choice.what:
        operators = fused_operators(choice.what)
        counts = {
            "RMS norms": _replace(model, _is_rms_norm, _norm_forwards(operators)),
            "gated linear units": _replace(model, _is_gated, _gate_forwards(operators)),
            "rotary embeddings": _turn_by(model, operators),
        }
        if not any(counts.values()):
            what = "has no norm, rotary embedding or gated linear unit that there is a kernel for"
            if is_wish:
                raise ConfigError(f"{type(model).__name__} {what}", key=FUSED_KEY, way_out="Set it to false.")
            choice = SpeedChoice("", f"the model {what}")
    facts_of(model).note(FusedKernels(choice, counts))


# Replaced forwards are methods of functions that modules share: the compiler tells other callables apart by their
# identity, and would compile every layer anew.


def _norm_forwards(operators: FusedOperators) -> Callable[[nn.Module], Forward]:
    """What makes the forward of an RMS norm: (…, H) → (…, H), in the type of the input."""

    @functools.cache
    def function_of(variant: tuple[float, bool], eps: float) -> Callable[..., torch.Tensor]:
        offset, rounds_first = variant

        def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
            return operators.rms_norm(hidden_states, self.weight, eps, offset, rounds_first)

        return forward

    def forward_of(module: nn.Module) -> Forward:
        variant = norm_variant(module)
        assert variant is not None
        return MethodType(function_of(variant, norm_eps(module)), module)

    return forward_of


def _gate_forwards(operators: FusedOperators) -> Callable[[nn.Module], Forward]:
    """What makes the forward of a gated linear unit: down(silu(gate(x)) · up(x)), (…, H) of (…, H), between whose
    projections, which may be adapters by now, stands one kernel."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(operators.silu_mul(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]

    return lambda module: MethodType(forward, module)


def _replace(model: nn.Module, fits: Callable[[nn.Module], bool], forward: Callable[[nn.Module], Forward]) -> int:
    """Modules of one kind are tried once: those of a class that look alike compute alike."""
    known: dict[tuple[type, float], bool] = {}
    found = []
    for module in model.modules():
        if "forward" in vars(module):  # replaced on the module already
            continue
        kind = type(module), norm_eps(module)
        if kind not in known:
            known[kind] = fits(module)
        if known[kind]:
            found.append(module)
    for module in found:
        replace_forward(module, ForwardKind.KERNEL, forward(module))
    return len(found)


def _turn_by(model: nn.Module, operators: FusedOperators) -> int:
    functions: dict[Forward, Forward] = {}  # one for all layers that call the same: they share compiled graphs
    rebound = 0
    for module in model.modules():
        if type(module).forward is not nn.Module.forward and _turns_plainly(module):
            by_library = global_of(module, ROTARY)
            if by_library not in functions:
                functions[by_library] = rotary_function(by_library, operators)
            rebind_globals(module, {ROTARY: functions[by_library]})
            rebound += 1
    return rebound


def rotary_function(by_library: Forward, operators: FusedOperators) -> Forward:
    """What turns whole heads that stand in front of their tokens by the kernel, and all else as before: layers may say
    where heads stand, and may hand over angles for a part of each head."""

    def turn(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **options: Any) -> Any:
        heads_dim = options.get("unsqueeze_dim", 1)
        if not rest and options.keys() <= {"unsqueeze_dim"} and cos.shape[-1] == q.shape[-1]:
            if heads_dim == 1 and cos.dim() == 3:
                return operators.rotary(q, k, cos, sin)
            if heads_dim == 0 and cos.dim() == 2:  # angles of one row, which all pictures share
                return operators.rotary(q, k, cos[None], sin[None])
        return by_library(q, k, cos, sin, *rest, **options)

    return turn


# --- what a module computes -------------------------------------------------------------------------------------------


def norm_eps(module: nn.Module) -> float:
    """What is added to the mean square; below zero for a module that has no such number."""
    eps = attribute_at(module, "variance_epsilon", attribute_at(module, "eps"))
    if isinstance(eps, int | float):
        return float(eps)
    return -1.0


def _is_rms_norm(module: nn.Module) -> bool:
    return norm_variant(module) is not None


@torch.no_grad()
def norm_variant(module: nn.Module) -> tuple[float, bool] | None:
    """Offset of the weight and whether it rounds before it, of an RMS norm; None of anything else."""
    own = dict(module.named_parameters(recurse=False))
    if own.keys() != {"weight"} or own["weight"].dim() != 1 or norm_eps(module) < 0 or list(module.children()):
        return None
    generator = torch.Generator().manual_seed(0)
    # In bf16 the variants differ: in fp32 one could not tell which rounds before it multiplies.
    x = torch.randn(3, own["weight"].shape[0], generator=generator).mul(2).bfloat16()
    weight = torch.randn(own["weight"].shape[0], generator=generator).bfloat16()
    try:
        output = torch.func.functional_call(module, {"weight": weight}, (x,))
    except (TypeError, RuntimeError, ValueError):  # it takes something else than one tensor
        return None
    for variant in ((0.0, True), (1.0, False), (0.0, False)):
        if isinstance(output, torch.Tensor) and torch.equal(output, plain_norm(x, weight, norm_eps(module), *variant)):
            return variant
    return None


@torch.no_grad()
def _is_gated(module: nn.Module) -> bool:
    """Whether it is down(silu(gate(x)) · up(x)) (Shazeer 2020, arXiv:2002.05202)."""
    has_projections = module._modules.keys() >= {*_GATED}
    if not has_projections or module._parameters:
        return False
    # The trial draws numbers, and the run must not notice.
    with torch.random.fork_rng(devices=[]):
        gate, up, down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)
        x = torch.randn(5, 4)
    # The class's forward with small layers of known weights in place of the module's own.
    tiny = copy.copy(module)
    tiny._modules = {**module._modules, "gate_proj": gate, "up_proj": up, "down_proj": down}
    try:
        output = type(module).forward(tiny, x)
    except (TypeError, RuntimeError, ValueError, AttributeError):
        return False
    return isinstance(output, torch.Tensor) and torch.allclose(output, down(F.silu(gate(x)) * up(x)))


@torch.no_grad()
def _turns_plainly(module: nn.Module) -> bool:
    """Whether a layer's rotary embedding turns halves of whole heads (Su et al. 2021, arXiv:2104.09864)."""
    if ROTARY not in called_globals(module):
        return False
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, 3, 8, generator=generator), torch.randn(2, 1, 3, 8, generator=generator)
    angles = torch.randn(2, 3, 4, generator=generator).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    try:
        turned = global_of(module, ROTARY)(q, k, cos, sin)
        wanted = [plain_rotary(each, cos, sin) for each in (q, k)]
        return all(torch.allclose(one, other) for one, other in zip(turned, wanted, strict=True))
    except (TypeError, RuntimeError, ValueError):
        return False
