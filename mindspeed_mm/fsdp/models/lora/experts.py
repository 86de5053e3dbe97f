"""The forward pass of adapters on fused experts: W_e + scale · B_e·A_e for each expert e.

PEFT's wrappers hold the adapters, one around the other for each parameter of a module; their own forward registers
parametrizations, which change classes and parameters under sharding's hands. Here the innermost module computes with
the sum in place of its parameter, inside of what shards it, whichever code computes the experts.

E experts, r rank, I inputs, O outputs of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.fsdp.models.loading.local_shard import local
from mindspeed_mm.fsdp.models.lora.names import ADAPTER
from mindspeed_mm.fsdp.ops.forward_stack import Forward, ForwardKind, replace_forward
from mindspeed_mm.fsdp.utils.model_parts import has_all

if TYPE_CHECKING:
    from peft.tuners.lora import ParamWrapper


def wrappers_of(model: nn.Module) -> dict[str, list[tuple[str, ParamWrapper]]]:
    """Name of a module of experts without PEFT's levels → its wrappers, the outermost first, with their names."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for name, module in model.named_modules():
        if has_all(module, "parameter_name", "base_layer"):
            found.setdefault(name.replace(".base_layer", ""), []).append((name, module))
    return found


def adapt_experts(model: nn.Module) -> None:
    """Let every module of experts with adapters compute with them; call it behind PEFT, before any plan."""
    for wrappers in wrappers_of(model).values():
        experts = wrappers[-1][1].base_layer
        adapted = AdaptedForward(experts, [wrapper for _, wrapper in wrappers])
        replace_forward(experts, ForwardKind.ADAPTER, adapted)
        for _, wrapper in wrappers:
            replace_forward(wrapper, ForwardKind.ADAPTER, InnerForward(wrapper))


class InnerForward:
    """The forward of a wrapper that leaves the work to the module inside."""

    def __init__(self, wrapper: ParamWrapper) -> None:
        self._wrapper = wrapper

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the module inside with the same arguments."""
        return self._wrapper.base_layer(*args, **kwargs)


class AdaptedForward:
    """The forward of a module of experts with the adapters of its wrappers."""

    def __init__(self, experts: nn.Module, wrappers: Sequence[ParamWrapper]) -> None:
        self._forward: Forward = experts.forward
        self._experts, self._wrappers = experts, wrappers

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the module's own forward with adapters added to its parameters."""
        with self._adapted():
            return self._forward(*args, **kwargs)

    @contextmanager
    def _adapted(self) -> Iterator[None]:
        """Inside, the module has the sums in place of its parameters."""
        own = self._experts._parameters
        kept = {wrapper.parameter_name: own[wrapper.parameter_name] for wrapper in self._wrappers}
        try:
            for wrapper in self._wrappers:
                if ADAPTER not in wrapper.active_adapters:  # switched off
                    continue
                own[wrapper.parameter_name] = adapted_weight(own[wrapper.parameter_name], wrapper)  # type: ignore[assignment, arg-type]
            yield
        finally:
            own.update(kept)  # also after an error: sharding goes on with these


def adapted_weight(weight: torch.Tensor, wrapper: ParamWrapper) -> torch.Tensor:
    """W + scale · B·A of the experts that this rank holds, a plain tensor."""
    own = local(weight)
    a_ErI, b_EOr = factors(wrapper.lora_A[ADAPTER].weight, wrapper.lora_B[ADAPTER].weight, wrapper.num_experts)
    mine = held_experts(weight, wrapper.num_experts)
    # (experts here, O, r) and (experts here, r, I)
    first, second = b_EOr[mine].to(own.dtype), a_ErI[mine].to(own.dtype)
    if not wrapper._did_swap_in_out_features:  # the module keeps (E, inputs, outputs)
        first, second = second.transpose(1, 2), first.transpose(1, 2)
    return torch.baddbmm(own, first, second, alpha=wrapper.scaling[ADAPTER])


def factors(a: torch.Tensor, b: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """((E, r, I), (E, O, r)): A and B of each expert. PEFT keeps A as (E·r, I) and B as (O, r·E).

    Args:
        a: All experts' A.
        b: All experts' B.
        experts: E.
    """
    return a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)


def held_experts(weight: torch.Tensor, experts: int) -> slice:
    """Which experts of a fused parameter are here: all, or those of this rank under expert parallelism."""
    if not isinstance(weight, DTensor):
        return slice(0, experts)
    by_expert = [axis for axis, placement in enumerate(weight.placements) if placement.is_shard(0)]
    if not by_expert:
        return slice(0, experts)
    (axis,) = by_expert
    own = experts // weight.device_mesh.size(axis)
    first = weight.device_mesh.get_local_rank(axis) * own
    return slice(first, first + own)
