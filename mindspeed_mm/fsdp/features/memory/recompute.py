"""Recomputes modules in the backward pass instead of keeping what they computed (Chen et al. 2016, arXiv:1604.06174);
results of single kernels may be kept all the same.

A module's `forward` is replaced on the instance: nothing is wrapped, so no parameter changes its name, and hooks, those
of sharding among them, stay outside of what is recomputed.

With the keys `model.skip_*_recompute`, under full recomputation, results of attention, gated delta-net and Kimi
delta-attention kernels are kept, and all else is computed again. An attention kernel is one operation of torch, whose
result is kept by its name. A delta net is many operations, or a kernel that torch does not see: the layer keeps what it
returned, and the activations that it saved.

A module keeps its inputs. Those that all ranks of tensor parallelism hold alike may be divided among them: each keeps a
part, and all of it is gathered for the second pass (Korthikanti et al. 2022, arXiv:2205.05198, section 5).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, noop_context_fn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.features.memory.kept_results import (
    ATTENTION,
    SELECTIVE,
    Contexts,
    KeptForward,
    keep_calls_of,
    keep_results,
)
from mindspeed_mm.fsdp.ops.experts import fused_experts, own_experts_of
from mindspeed_mm.fsdp.ops.forward_stack import Args, Forward, ForwardKind, Kwargs, replace_forward
from mindspeed_mm.fsdp.ops.real_tokens import RealTokens
from mindspeed_mm.fsdp.params.feature_args import RecomputePlan
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

CACHES = {"past_key_values": None, "past_key_value": None, "layer_past": None, "use_cache": False}
"""Arguments of layers → what they are without a cache. A second forward pass would write into it a second time, and a
few rows behind others; training needs none."""

SMALLEST_BYTES = 1 << 20
"""Smallest input that is worth a collective in the backward pass."""


def without_caches(kwargs: Kwargs) -> Kwargs:
    """Arguments of a layer as they are without a cache."""
    return kwargs | {name: nothing for name, nothing in CACHES.items() if name in kwargs}


def recompute_modules(
    model: nn.Module,
    names: Iterable[str],
    *,
    use_reentrant: bool = False,
    contexts: Contexts | None = None,
    inputs: DistributedInputs | None = None,
) -> None:
    """Recompute these modules in the backward pass; call it before sharding.

    Args:
        model: Parameters on meta or real.
        names: Modules, none inside another.
        use_reentrant: Run a backward pass inside the backward pass, autograd's older way. Gradients of what several
            modules take in, such as an embedding of the timestep, are then summed in another order.
        contexts: What is kept of the first pass (`kept_results`); nothing when None. Not with `use_reentrant`.
        inputs: Divides inputs that other ranks hold as well; one for all modules of a model. Not with `use_reentrant`.
    """
    for name in names:
        module = model.get_submodule(name)
        replace_forward(module, ForwardKind.RECOMPUTE, RecomputedForward(module, use_reentrant, contexts, inputs))


class RecomputedForward:
    """A module's `forward` that keeps its inputs, and what `contexts` says. Random numbers are drawn again as they were
    the first time.

    Args:
        module: Its own forward is called once more in the backward pass. Not in passes without gradients.
        use_reentrant: See `recompute_modules`.
        contexts: See `recompute_modules`.
        inputs: See `recompute_modules`.
    """

    def __init__(
        self,
        module: nn.Module,
        use_reentrant: bool,
        contexts: Contexts | None = None,
        inputs: DistributedInputs | None = None,
    ) -> None:
        self._forward: Forward = module.forward  # bound: a deep copy of the module takes its own along
        self._module = module
        self._use_reentrant = use_reentrant
        self._contexts = contexts or noop_context_fn
        self._inputs = inputs
        self._real_tokens: list[RealTokens] = []
        for experts in fused_experts(module).values():
            tokens = own_experts_of(experts).real_tokens
            if tokens is not None and tokens not in self._real_tokens:
                self._real_tokens.append(tokens)

    def __call__(self, *args: object, **kwargs: object) -> Any:
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

        function: Forward = run
        if self._inputs is not None:
            function, leaves = self._inputs.divided(run, leaves)
        return checkpoint(function, *leaves, use_reentrant=False, preserve_rng_state=True, context_fn=self._contexts)

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

    def _reentrant(self, forward: Forward, leaves: Sequence[object], structure: TreeSpec) -> object:
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


# --- inputs that other ranks hold as well -----------------------------------------------------------------------------


class AlikeRanks(Protocol):
    """Ranks that hold the same tensors: `AxisRanks`, or what stands for them in a forecast."""

    size: int
    rank: int

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """(n,) of each rank → (ranks · n,) of all, in their order."""
        ...


_Layout = tuple[torch.Size, tuple[int, ...]]
"""Shape and strides."""


class DistributedInputs:
    """Divides the inputs of recomputed modules among ranks that are called with the same ones; shared by all modules of
    a model.

    A part is a copy: the input itself is freed as soon as nobody else needs it. What several modules are given, such as
    text to attend to, stays whole from the second one on, as parts of it would be kept beside it.

    Args:
        ranks: Each calls every module equally often, in one order, and so gathers in one order.
    """

    def __init__(self, ranks: AlikeRanks) -> None:
        self._ranks = ranks
        self._known: set[tuple[StorageWeakRef, int, int]] = set()
        """Storage, offset and number of elements of what a module was given before, as long as it lives."""

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedInputs:
        return memo.setdefault(id(self), DistributedInputs(self._ranks))

    def divided(self, function: Forward, leaves: Sequence[object]) -> tuple[Forward, list[object]]:
        """A function and its arguments with this rank's parts among them. The first call, which is the first pass,
        computes with what is there; each further one gathers.

        Args:
            function: Takes `leaves` by position.
            leaves: Of one call of a module.
        """
        kept = list(leaves)
        layouts: dict[int, _Layout] = {}
        places = set()
        for position, leaf in enumerate(leaves):
            if not _comes_from_the_model(leaf):
                continue
            place = (StorageWeakRef(leaf.untyped_storage()), leaf.storage_offset(), leaf.numel())
            places.add(place)
            if _is_dense(leaf) and leaf.nbytes >= SMALLEST_BYTES and place not in self._known:
                kept[position] = self._own_part(leaf)
                layouts[position] = (leaf.shape, leaf.stride())
        self._known = {place for place in self._known | places if not place[0].expired()}
        first = [leaves]

        def run(*kept: object) -> Any:
            if first:
                return function(*first.pop())
            return function(*self._gathered(kept, layouts))

        return run, kept

    def _own_part(self, whole: torch.Tensor) -> torch.Tensor:
        """(ceil(numel / ranks),), this rank's; the last ones filled up with zeros."""
        flat = whole.detach().as_strided((whole.numel(),), (1,))
        length = -(-flat.numel() // self._ranks.size)
        own = flat[self._ranks.rank * length : (self._ranks.rank + 1) * length]
        part = own.new_zeros(length)
        part[: own.numel()] = own
        return part

    def _gathered(self, kept: Sequence[object], layouts: Mapping[int, _Layout]) -> list[object]:
        """What the first pass was given: parts at these positions joined, laid out in memory as they were."""
        given = list(kept)
        for position, layout in layouts.items():
            part: Any = kept[position]
            whole = self._ranks.gather(part).as_strided(*layout)
            given[position] = whole.requires_grad_()  # autograd must save the same as in the first pass
        return given


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie one behind the other in memory, whatever the order of its dimensions."""
    length = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != length:
            return False
        length *= size
    return True


def _comes_from_the_model(leaf: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a plain tensor that was computed from parameters: ranks compute the same. What was received from
    another pipeline stage is held by the schedule anyway."""
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.grad_fn is not None
        and leaf.is_floating_point()
        and leaf.layout is torch.strided
        and not is_traceable_wrapper_subclass(leaf)
    )


# --- kernels that are not computed again ------------------------------------------------------------------------------

SKIP_ATTENTION = "model.skip_flash_attn_recompute"
DELTA_NETS = {
    "model.skip_gdn_recompute": (("gated_delta_rule",), "gated delta nets"),
    "model.skip_kda_recompute": (("kimi_delta_attention", "kda"), "Kimi delta attention"),
}
"""Key → parts of names of functions that such a layer calls, and what people call the layer."""


def apply_kept_results(model: nn.Module, plan: RecomputePlan, keys: ModelArguments) -> Contexts | None:
    """Let layers keep what they return, in place; the result is what recomputed modules run under.

    Args:
        model: Not sharded yet; one rank's part of it where it is cut into stages.
        plan: Of recomputation, which is on.
        keys: The `model` section.

    Raises:
        ConfigError: See `check_skipped_kernels`.
    """
    if keys.skip_flash_attn_recompute:
        check_attention(model)
    asked = _delta_nets_asked_for(keys)
    for key in asked:
        for layer in find_delta_nets(model, key):
            if not isinstance(layer.forward, KeptForward):
                keep_calls_of(layer, key)
    operations = frozenset[str]()
    if plan.mode == "selective":
        operations = SELECTIVE
    elif keys.skip_flash_attn_recompute:
        operations = ATTENTION
    return keep_results(operations, calls=bool(asked))


def check_skipped_kernels(model: nn.Module, keys: ModelArguments) -> None:
    """Raise `ConfigError` for a key that the whole model has no layers for, or whose results cannot be kept."""
    if keys.skip_flash_attn_recompute:
        check_attention(model)
    for key in _delta_nets_asked_for(keys):
        if not find_delta_nets(model, key):
            _, layers = DELTA_NETS[key]
            raise ConfigError(
                f"true, but {type(model).__name__} has no layers of {layers}", key=key, way_out="Leave it out."
            )


def _delta_nets_asked_for(keys: ModelArguments) -> list[str]:
    asked = {"model.skip_gdn_recompute": keys.skip_gdn_recompute, "model.skip_kda_recompute": keys.skip_kda_recompute}
    return [key for key in DELTA_NETS if asked[key]]


def check_attention(model: nn.Module) -> None:
    """Raise `ConfigError` unless attention is a kernel that computes the same twice."""
    if attribute_at(model, "config._attn_implementation") == "eager":
        raise ConfigError(
            "true, but attention is computed by 'eager', which has no kernel whose result could be kept",
            key=SKIP_ATTENTION,
            way_out="Leave model.attn_implementation out, or this key.",
        )
    for name, module in model.named_modules():
        chance = attribute_at(module, "attention_dropout", 0.0)
        if isinstance(chance, float) and chance > 0:
            raise ConfigError(
                f"true, but '{name}' has a dropout of {chance} in its attention, whose random numbers are to be drawn "
                "again",
                key=SKIP_ATTENTION,
                way_out="Leave it out, or set attention_dropout to 0 in the model's config.json.",
            )


def find_delta_nets(model: nn.Module, key: str) -> list[nn.Module]:
    """Layers that call the kernel that a key is about."""
    parts, _ = DELTA_NETS[key]
    found = []
    for module in model.modules():
        names = " ".join(attribute_at(inspect.unwrap(type(module).forward), "__code__.co_names", ()))
        if any(part in names for part in parts):
            found.append(module)
    return found
