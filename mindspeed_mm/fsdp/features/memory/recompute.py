"""Recomputes modules in the backward pass instead of keeping what they computed (Chen et al. 2016, arXiv:1604.06174).

A module's `forward` is replaced on the instance: nothing is wrapped, so no parameter changes its name, and hooks, those
of sharding among them, stay outside of what is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, noop_context_fn

from mindspeed_mm.fsdp.features.memory.kept_results import Contexts
from mindspeed_mm.fsdp.ops.experts import fused_experts, own_experts_of
from mindspeed_mm.fsdp.ops.forward_stack import Args, Forward, ForwardKind, Kwargs, replace_forward
from mindspeed_mm.fsdp.ops.real_tokens import RealTokens

CACHES = {"past_key_values": None, "past_key_value": None, "layer_past": None, "use_cache": False}
"""Arguments of layers → what they are without a cache. A second forward pass would write into it a second time, and a
few rows behind others; training needs none."""


def without_caches(kwargs: Kwargs) -> Kwargs:
    """Arguments of a layer as they are without a cache."""
    return kwargs | {name: nothing for name, nothing in CACHES.items() if name in kwargs}


def recompute_modules(
    model: nn.Module, names: Iterable[str], *, use_reentrant: bool = False, contexts: Contexts | None = None
) -> None:
    """Recompute these modules in the backward pass; call it before sharding.

    Args:
        model: Parameters on meta or real.
        names: Modules, none inside another.
        use_reentrant: Run a backward pass inside the backward pass, autograd's older way. Gradients of what several
            modules take in, such as an embedding of the timestep, are then summed in another order.
        contexts: What is kept of the first pass (`kept_results`); nothing when None. Not with `use_reentrant`.
    """
    for name in names:
        module = model.get_submodule(name)
        replace_forward(module, ForwardKind.RECOMPUTE, RecomputedForward(module, use_reentrant, contexts))


class RecomputedForward:
    """A module's `forward` that keeps its inputs, and what `contexts` says. Random numbers are drawn again as they were
    the first time.

    Args:
        module: Its own forward is called once more in the backward pass. Not in passes without gradients.
        use_reentrant: See `recompute_modules`.
        contexts: See `recompute_modules`.
    """

    def __init__(self, module: nn.Module, use_reentrant: bool, contexts: Contexts | None = None) -> None:
        self._forward: Forward = module.forward  # bound: a deep copy of the module takes its own along
        self._module = module
        self._use_reentrant = use_reentrant
        self._contexts = contexts or noop_context_fn
        self._real_tokens: list[RealTokens] = []
        for experts in fused_experts(module).values():
            tokens = own_experts_of(experts).real_tokens
            if tokens is not None and tokens not in self._real_tokens:
                self._real_tokens.append(tokens)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs of the module, of the same types as without recomputation."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        kwargs = without_caches(kwargs)
        # `checkpoint` looks for devices, and the re-entrant one for gradients, in positional tensors only, while
        # diffusers' models call their blocks by keyword: dropout of an accelerator would not be drawn again.
        leaves, structure = tree_flatten((args, kwargs))
        forward = self._of_this_call()
        if self._use_reentrant:
            return self._reentrant(forward, leaves, structure)

        def run(*leaves: object) -> Any:
            args, kwargs = tree_unflatten(leaves, structure)
            return forward(*args, **kwargs)

        return checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=True, context_fn=self._contexts)

    def _of_this_call(self) -> Forward:
        """The module's forward with the padding that this call has: by the backward pass the model may have been called
        with other rows."""
        remembered = [(tokens, tokens.of_this_call) for tokens in self._real_tokens]
        if not remembered:
            return self._forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            for tokens, of_this_call in remembered:
                tokens.of_this_call = of_this_call
            return self._forward(*args, **kwargs)

        return forward

    def _reentrant(self, forward: Forward, leaves: Sequence[object], structure: TreeSpec) -> Any:
        """Autograd sees one function from tensors to tensors; it must have an input that needs a gradient."""
        of_outputs = structure  # until a pass has run

        def run(_needs_gradient: torch.Tensor | None, *leaves: object) -> Args:
            nonlocal of_outputs
            args, kwargs = tree_unflatten(leaves, structure)
            outputs, of_outputs = tree_flatten(forward(*args, **kwargs))
            return tuple(outputs)

        trains = any(parameter.requires_grad for parameter in self._module.parameters())
        takes_gradient = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        if trains:
            needs_gradient = torch.empty(0, requires_grad=True)
            outputs = checkpoint(run, needs_gradient, *leaves, use_reentrant=True, preserve_rng_state=True)
        elif takes_gradient:
            outputs = checkpoint(run, None, *leaves, use_reentrant=True, preserve_rng_state=True)
        else:
            outputs = run(None, *leaves)
        return tree_unflatten(list(outputs), of_outputs)
