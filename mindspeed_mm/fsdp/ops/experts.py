"""Experts of a mixture: which there are in a model, and what a token's experts make of it.

Transformers keeps all experts of a layer in fused parameters (E, …) and calls them through a registry; an
implementation of ours is registered there, so no model is changed. T tokens, K experts a token, S pairs of a token and
one of its experts, E experts, H hidden features.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor

from mindspeed_mm.fsdp.ops.grouped_matmul import GroupedLinear, grouped_linear
from mindspeed_mm.fsdp.ops.host_values import outside_graphs
from mindspeed_mm.fsdp.ops.real_tokens import RealTokens
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, has_all

EXPERTS_NAME = "mm_experts"
"""Our name in transformers' registry."""
_FORWARD = "_mm_experts"
_PRODUCT = "_mm_grouped_linear"
_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")


class ExpertModule(Protocol):
    """A module behind transformers' experts interface."""

    num_experts: int
    is_transposed: bool
    has_gate: bool
    has_bias: bool
    config: Any

    def _apply_gate(self, inner: torch.Tensor) -> torch.Tensor: ...

    def act_fn(self, inner: torch.Tensor) -> torch.Tensor:
        """What stands between the projections where there is no gate."""
        ...

    def post_expert_norm(self, outputs: torch.Tensor) -> torch.Tensor:
        """Only of modules with a true `has_post_expert_norm`."""
        ...


def fused_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules behind transformers' experts interface, by name: they say how their fused parameters lie."""
    return {name: module for name, module in model.named_modules() if is_fused(module)}


def is_fused(module: nn.Module) -> bool:
    """Whether a module holds its experts in fused parameters (E, …), in a layout that it declares."""
    if not has_all(module, "is_transposed", "has_gate", "has_bias", "config"):
        return False
    count, fused = attribute_at(module, "num_experts"), 0
    for name in _PARAMETERS:
        parameter = module._parameters.get(name)
        if parameter is None:
            continue
        if parameter.dim() != 3 or parameter.shape[0] != count:
            return False
        fused += 1
    return fused > 1


class Weights(NamedTuple):
    """Fused parameters of the experts that compute here."""

    up: torch.Tensor
    """Gate and up projection, or up alone."""
    down: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    @classmethod
    def of(cls, module: ExpertModule) -> Weights:
        """Those of a module, as this rank has them."""

        def own(name: str) -> torch.Tensor:
            return local(getattr(module, name))

        up = "gate_up_proj" if module.has_gate else "up_proj"
        if not module.has_bias:
            return cls(own(up), own("down_proj"), None, None)
        return cls(own(up), own("down_proj"), own(f"{up}_bias"), own("down_proj_bias"))


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's experts of a parameter that is spread over ranks; gradients flow."""
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    return parameter


def run_experts(module: ExpertModule, weights: Weights, rows_SH: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """What experts make of rows that are sorted by expert. Whoever spreads experts over ranks comes here: their grouped
    products are computed nowhere else.

    Args:
        module: Says how weights lie, how the gate works, and what computes its products (`use_grouped_linear`).
        weights: Of as many experts as `counts_E` has entries.
        rows_SH: The rows of the first expert, then those of the second, …
        counts_E: Rows of each expert.
    """
    product: GroupedLinear = getattr(module, _PRODUCT, grouped_linear)
    inner = product(rows_SH, weights.up, counts_E, weights.up_bias, transposed=module.is_transposed)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outputs = product(inner, weights.down, counts_E, weights.down_bias, transposed=module.is_transposed)
    if getattr(module, "has_post_expert_norm", False):
        outputs = module.post_expert_norm(outputs)
    return outputs


class Pairs(NamedTuple):
    """Pairs of a token and one of its experts, sorted by expert; those of one expert in the order of tokens."""

    slots_S: torch.Tensor
    """Number of each pair among all T × K."""
    counts_E: torch.Tensor
    """Pairs of each expert."""


def sort_pairs(experts_TK: torch.Tensor, num_experts: int, *, number: int | None) -> Pairs:
    """Sort the choices of a router.

    Args:
        experts_TK: Numbers of the experts; `num_experts` where a pair is left out.
        num_experts: E.
        number: Pairs that are not left out; None: the host reads it off the device, and waits for that.
    """
    ids = experts_TK.reshape(-1)
    slots = ids.argsort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.long, device=ids.device)
    counts = counts.scatter_add(0, ids, torch.ones_like(ids))[:num_experts]
    if number is None:
        number = int(counts.sum())
    return Pairs(slots[:number], counts)


def combine(outputs_SH: torch.Tensor, pairs: Pairs, weights_TK: torch.Tensor) -> torch.Tensor:
    """(T, H): each token's sum of its experts' outputs, times the router's weights."""
    tokens, choices = weights_TK.shape
    weighted = outputs_SH * taken(weights_TK.reshape(-1), pairs.slots_S)[:, None]
    return _summed(weighted, pairs.slots_S, tokens, choices)


# --- rows in another order --------------------------------------------------------------------------------------------


def taken(rows_N: torch.Tensor, places_S: torch.Tensor) -> torch.Tensor:
    """(S, …): the rows at places that differ from each other. Plain indexing does not know that they do, and adds up
    its gradient one by one (`index_put` with `accumulate`); here it is copied to its places."""
    rows: torch.Tensor = _Taken.apply(rows_N, places_S)  # type: ignore[no-untyped-call]
    return rows


def spread(hidden_TH: torch.Tensor, slots_S: torch.Tensor, choices: int) -> torch.Tensor:
    """(S, H): the token of each pair.

    Args:
        hidden_TH: Tokens.
        slots_S: Numbers of pairs among all T × K.
        choices: K. A token's gradients are summed in the order of its choices, the same on every device.
    """
    rows: torch.Tensor = _Spread.apply(hidden_TH, slots_S, choices)  # type: ignore[no-untyped-call]
    return rows


def _summed(rows_SH: torch.Tensor, slots_S: torch.Tensor, tokens: int, choices: int) -> torch.Tensor:
    """(T, H). Slots and a sum instead of `index_add`, which adds in any order on an accelerator."""
    slots = rows_SH.new_zeros(tokens * choices, rows_SH.shape[1]).index_copy(0, slots_S, rows_SH)
    return slots.view(tokens, choices, rows_SH.shape[1]).sum(dim=1)


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows_N: torch.Tensor, places_S: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places_S)
        ctx.number = len(rows_N)
        return rows_N.index_select(0, places_S)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient_S,) = gradients
        whole = gradient_S.new_zeros(ctx.number, *gradient_S.shape[1:])
        return whole.index_copy_(0, ctx.saved_tensors[0], gradient_S), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, hidden_TH: torch.Tensor, slots_S: torch.Tensor, choices: int) -> torch.Tensor:
        ctx.save_for_backward(slots_S)
        ctx.sizes = len(hidden_TH), choices
        return hidden_TH.index_select(0, slots_S // choices)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _summed(gradients[0], ctx.saved_tensors[0], *ctx.sizes), None, None


class ExpertsForward:
    """The forward pass of one expert module, on the experts of this rank.

    Args:
        real_tokens: Given: padding goes through no expert.
    """

    def __init__(self, real_tokens: RealTokens | None = None) -> None:
        self.real_tokens = real_tokens

    @property
    def fits_graphs(self) -> bool:
        """Whether a compiler may look inside: nothing is read from the device, and no other rank is asked."""
        return type(self) is ExpertsForward and self.real_tokens is None

    def __call__(
        self, module: ExpertModule, hidden_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """(T, H), in the dtype of `hidden_TH`."""
        experts_TK, number = self.without_padding(experts_TK, module.num_experts)
        pairs = sort_pairs(experts_TK, module.num_experts, number=number)
        rows_SH = spread(hidden_TH, pairs.slots_S, experts_TK.shape[1])
        outputs_SH = self.outputs(module, rows_SH, pairs.counts_E)
        return combine(outputs_SH, pairs, weights_TK).to(hidden_TH.dtype)

    def outputs(self, module: ExpertModule, rows_SH: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """What the experts make of rows that are sorted by expert, in the same order."""
        return run_experts(module, Weights.of(module), rows_SH, counts_E)

    def without_padding(self, experts_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, int | None]:
        """The choices with those of padding left out, and how many are not, where the host knows."""
        if self.real_tokens is None:
            return experts_TK, experts_TK.numel()
        real_T = self.real_tokens.mask(len(experts_TK))
        if real_T is None:
            return experts_TK, experts_TK.numel()
        number = self.real_tokens.number
        if number is not None:
            number *= experts_TK.shape[1]
        return experts_TK.masked_fill(~real_T[:, None], num_experts), number


_PLAIN = ExpertsForward()


def experts_forward(
    module: ExpertModule, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What transformers calls, with its names of the arguments."""
    forward = own_experts_of(module)
    if not forward.fits_graphs:
        return _outside(forward, module, hidden_states, top_k_index, top_k_weights)
    return forward(module, hidden_states, top_k_index, top_k_weights)


def own_experts_of(module: ExpertModule | nn.Module) -> ExpertsForward:
    """What `use_own_experts` gave a module of experts; the plain one where it gave none."""
    forward: ExpertsForward = getattr(module, _FORWARD, _PLAIN)
    return forward


@outside_graphs
def _outside(
    forward: ExpertsForward,
    module: ExpertModule,
    hidden_TH: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    return forward(module, hidden_TH, experts_TK, weights_TK)


def use_own_experts(module: Any, forward: ExpertsForward | None = None) -> None:
    """Let a module behind transformers' interface compute its experts by our implementation.

    Args:
        module: Of `fused_experts`.
        forward: What it does; the plain one when None.
    """
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EXPERTS_NAME, experts_forward)
    module.config._experts_implementation = EXPERTS_NAME
    setattr(module, _FORWARD, forward or _PLAIN)


def use_grouped_linear(module: nn.Module, product: GroupedLinear) -> None:
    """Let a module of `fused_experts` that is computed by our implementation take another grouped product."""
    setattr(module, _PRODUCT, product)
