"""Context parallelism of image and video generators of diffusers: image tokens are spread, text where it attends with
them; the loss is that of the whole sample on every rank.

What a family's plan names is cut and put together by hooks. Its attention processors are given another function to
attend by, on this model alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.patterns import compile_pattern
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.ops.attention import AttentionError
from mindspeed_mm.fsdp.ops.context_attention.layer import ContextGroups, attend_to_whole
from mindspeed_mm.fsdp.ops.context_attention.layout import SequenceLayout, build_layout, concatenate_layouts
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import IMAGE, Along, SamplePlan, Streams
from mindspeed_mm.fsdp.ops.context_attention.share import CONTEXT_KEY, ContextShare
from mindspeed_mm.fsdp.ops.forward_stack import Args, CallArguments, Kwargs, function_with
from mindspeed_mm.fsdp.ops.skiparse import Attend, SkiparseSets, skiparse_attention

KEYS = "parallel.ring_attention_size · parallel.ulysses_parallel_size"
_DISPATCH, _SDPA = "dispatch_attention_fn", "scaled_dot_product_attention"
_SETS = "skiparse_attention"
"""By which processors attend: diffusers' dispatcher (B, L, H, D), torch's own function (B, H, L, D), or that of
`ops/skiparse.py`."""


class SpreadSample:
    """The sample that a generator works on, for its hooks and attention layers.

    It is that of the latest call: the backward pass of a micro-batch ends before the next one begins, so layers that
    are computed again find theirs. A pipeline, which holds several at a time, must not be combined with it.

    Args:
        groups: Who shares a sample.
    """

    def __init__(self, groups: ContextGroups) -> None:
        self._groups = groups
        self.is_spread = False
        self._shares: dict[Streams, ContextShare] = {}
        self._masks: dict[Streams, Tensor] = {}

    def begin(self, is_spread: bool) -> None:
        """The next sample is whole on this rank, or spread."""
        self.is_spread = is_spread
        self._shares, self._masks = {}, {}

    def place(self, stream: str, tokens: int) -> ContextShare:
        """Spread a stream of so many tokens, of all ranks.

        Raises:
            DataError: There are fewer tokens than ranks.
        """
        layout = spread_layout(tokens, self._groups.ring_size, self._groups.ulysses_size, stream)
        self._shares[stream,] = ContextShare(self._groups, layout)
        return self._shares[stream,]

    def share(self, *streams: str) -> ContextShare:
        """What this rank holds of streams, rank by rank one behind the other; they have been placed."""
        if streams not in self._shares:
            layout, *others = (self._shares[stream,].layout for stream in streams)
            for other in others:
                layout = concatenate_layouts(layout, other)
            self._shares[streams] = ContextShare(self._groups, layout)
        return self._shares[streams]

    def own(self, value: object, along: Along | tuple[Along, ...]) -> Any:
        """Own tokens of a tensor, or of each of several; what is not a tensor, or not of the whole length, stays."""
        if isinstance(value, tuple | list):
            along_each = along if isinstance(along[0], tuple) else (along,) * len(value)
            return type(value)(map(self.own, value, along_each))
        stream, dim = cast(Along, along)
        if not isinstance(value, Tensor) or value.dim() <= dim:
            return value
        share = self._shares.get((stream,)) or self.place(stream, value.shape[dim])
        if value.shape[dim] != share.layout.length:
            return value
        return share.take(value, dim)

    def key_mask(self, streams: Streams, mask: Tensor) -> Tensor:
        """(B, tokens of all ranks) bool: the keys that a mask of attention, (B, 1, 1 or queries, keys), shows to
        anyone. Its keys are all of the streams', or the own ones. Layers of a sample mask alike: the first is asked.

        Raises:
            AttentionError: The mask is of another shape or kind.
        """
        if streams not in self._masks:
            share, shown = self.share(*streams), mask.shape[-1]
            own, whole = len(share.positions), share.layout.length
            if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1 or shown not in (own, whole):
                what = f"{mask.dtype} {tuple(mask.shape)}"
                raise AttentionError(f"a generator masks attention to {whole} tokens across ranks by {what}")
            keys_BL = mask.any(dim=-2)[:, 0]
            if shown != whole:  # cut before it was put together, it has the own keys alone
                keys_BL = share.gather(keys_BL.int(), 1, sum_gradients=False).bool()
            self._masks[streams] = keys_BL
        return self._masks[streams]

    def attend(
        self, streams: Streams, q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """Attention of streams to themselves across ranks, (B, own tokens, H, D)."""
        if mask is not None:
            mask = self.key_mask(streams, mask)
        return self.share(*streams).attend(q_BLHD, k_BLHD, v_BLHD, causal=False, scale=scale, key_mask=mask)

    def attend_to_whole(
        self, streams: Streams, q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, attend: Callable[..., Tensor]
    ) -> Tensor:
        """The same by a function that is given all tokens of some heads."""
        layout = self.share(*streams).layout
        return attend_to_whole(q_BLHD, k_BLHD, v_BLHD, self._groups, layout, attend)


def spread_layout(tokens: int, ring: int, ulysses: int, stream: str = IMAGE) -> SequenceLayout:
    """The layout of tokens over `ring × ulysses` ranks, each of which has some.

    Raises:
        DataError: There are fewer tokens than ranks.
    """
    layout = build_layout(tokens, ring, ulysses)
    if layout.leaves_ranks_empty:
        raise DataError(
            f"a sample of {tokens} tokens ({stream}) cannot be spread over {ring * ulysses} ranks",
            key=KEYS,
            way_out=f"Let their product be at most {tokens}, or take larger samples.",
        )
    return layout


def require_sample_plan(model: nn.Module) -> SamplePlan:
    """Where a generator's family is cut.

    Raises:
        ConfigError: The family does not say, or says why it cannot be.
    """
    adapter, why = facts_of(model).adapter, ""
    if adapter is not None:
        if adapter.sample_plan is not None:
            return adapter.sample_plan
        why = adapter.whole_because
    raise ConfigError(
        f"{type(model).__name__} cannot spread a sample over ranks: {why or 'its adapter has no sample_plan'}",
        key=KEYS,
        way_out="Set both sizes to 1.",
    )


def _token_counter(model: nn.Module) -> Callable[[tuple[int, ...]], int]:
    """What says how many tokens latents (C, …) become."""
    adapter = facts_of(model).adapter
    assert adapter is not None
    return adapter.geometry.tokens


def apply_to_generator(model: nn.Module, groups: ContextGroups) -> None:
    """Let a generator work on a share when the call brings `mm_context`; call it before sharding.

    Args:
        model: Bears its adapter, which says where its family is cut.
        groups: Who shares a sample.
    """
    plan, sample = require_sample_plan(model), SpreadSample(groups)
    model.register_forward_pre_hook(partial(_begin, plan, sample, _token_counter(model)), with_kwargs=True)
    for pattern, arguments in plan.blocks.items():
        for block in _matched(model, pattern):
            order = tuple(inspect.signature(block.forward).parameters)
            hook = partial(_cut_arguments, sample, arguments, order)
            # In front: what else is hooked in works on own tokens.
            block.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    for name, along in plan.rejoined.items():
        module = model.get_submodule(name)
        last = module[-1] if isinstance(module, nn.ModuleList) else module
        last.register_forward_hook(partial(_whole_output, sample, along, True))
    for name, along in plan.gathered:
        model.get_submodule(name).register_forward_hook(partial(_whole_output, sample, along, False))
    for pattern, streams in plan.attention.items():
        for module in _matched(model, pattern):
            attend_across_ranks(module, sample, streams)


def _matched(model: nn.Module, pattern: str) -> list[nn.Module]:
    """None, too: releases of a family differ in what their blocks hold."""
    expression = compile_pattern(pattern, key="sample_plan")
    return [module for name, module in model.named_modules() if expression.fullmatch(name)]


def _begin(
    plan: SamplePlan,
    sample: SpreadSample,
    tokens_of: Callable[[tuple[int, ...]], int],
    _: nn.Module,
    args: Args,
    kwargs: Kwargs,
) -> CallArguments:
    """Hook in front of the model."""
    sample.begin(kwargs.pop(CONTEXT_KEY, None) is not None)
    if not sample.is_spread or not plan.inputs:
        return args, kwargs
    if "hidden_states" not in plan.inputs:  # latents, of which tokens are made inside
        sample.place(IMAGE, tokens_of(tuple(kwargs["hidden_states"].shape[1:])))
    for key, along in plan.inputs.items():
        if key in kwargs:
            kwargs[key] = sample.own(kwargs[key], along)
    return args, kwargs


def _cut_arguments(
    sample: SpreadSample,
    arguments: Mapping[str, Along | tuple[Along, ...]],
    order: tuple[str, ...],
    _: nn.Module,
    args: Args,
    kwargs: Kwargs,
) -> CallArguments:
    if not sample.is_spread:
        return args, kwargs
    given, by_name = list(args), dict(kwargs)
    for name, along in arguments.items():
        place = order.index(name)
        if place < len(given):
            given[place] = sample.own(given[place], along)
        elif name in by_name:
            by_name[name] = sample.own(by_name[name], along)
    return tuple(given), by_name


def _whole_output(
    sample: SpreadSample, along: Along, sum_gradients: bool, _: nn.Module, __: object, output: Tensor
) -> Tensor:
    if not sample.is_spread:
        return output
    stream, dim = along
    return sample.share(stream).gather(output, dim, sum_gradients=sum_gradients)


def check_tokens(model: nn.Module, latent_shape: tuple[int, ...], ring: int, ulysses: int) -> None:
    """Raise `DataError` when a sample, (C, …) of latents, has fewer tokens than there are ranks to spread it over."""
    spread_layout(_token_counter(model)(latent_shape), ring, ulysses)


# --- attention --------------------------------------------------------------------------------------------------------


def check_attention(model: nn.Module, ring: int) -> None:
    """Raise `ConfigError` for a generator that cannot be spread over ranks: it does not say where it is cut, a
    processor of it attends by no function that is known here, or by one that a ring of this size cannot do."""
    for pattern in require_sample_plan(model).attention:
        for module in _matched(model, pattern):
            processor = module.processor
            if _attends_by(processor, _SETS):
                if ring > 1:
                    raise ConfigError(
                        f"{type(model).__name__} attends within sets of tokens, and ranks of a ring hold parts of them",
                        key="parallel.ring_attention_size",
                        way_out="Set parallel.ulysses_parallel_size instead: its ranks have whole sets of some heads.",
                    )
            elif not (_attends_by(processor, _DISPATCH) or _attends_by(processor, _SDPA)):
                raise ConfigError(
                    f"{type(processor).__name__} attends neither by {_DISPATCH} nor by {_SDPA}",
                    key=KEYS,
                    way_out="Set both sizes to 1.",
                )


def _call_of(processor: object) -> Any:
    """The function that a processor is."""
    return inspect.unwrap(type(processor).__call__)  # type: ignore[operator]


def _attends_by(processor: object, function: str) -> bool:
    return function in _call_of(processor).__code__.co_names


def attend_across_ranks(module: nn.Module, sample: SpreadSample, streams: Streams) -> None:
    """Let a module's attention processor attend across ranks while a sample is spread.

    Args:
        module: Of diffusers, with a `processor` (see `check_attention`); it gets one of its own.
        sample: Says when.
        streams: What attends to itself there.
    """
    processor = copy.copy(module.processor)
    call = _call_of(processor)
    others: JsonObject = {}
    if _attends_by(processor, _DISPATCH):
        others[_DISPATCH] = _dispatching(sample, streams, call.__globals__[_DISPATCH])
    if _attends_by(processor, _SDPA):
        others["F"] = _functions_with(_by_heads(sample, streams))
    if _attends_by(processor, _SETS):
        others[_SETS] = _within_sets(sample, streams)
    own_class = type(type(processor).__name__, (type(processor),), {"__call__": function_with(call, others)})
    processor.__class__ = own_class
    module.processor = processor


def _dispatching(sample: SpreadSample, streams: Streams, whole: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """In the place of diffusers' dispatcher."""

    def dispatch(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **others: Any,
    ) -> Tensor:
        if not sample.is_spread:
            return whole(query, key, value, attn_mask, dropout_p, is_causal, scale, **others)
        _refuse(dropout_p, is_causal)
        return sample.attend(streams, query, key, value, attn_mask, scale)

    return dispatch


def _by_heads(sample: SpreadSample, streams: Streams) -> Callable[..., Tensor]:
    """In the place of torch's function, which has heads before tokens."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **others: Any,
    ) -> Tensor:
        if not sample.is_spread:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, **others)
        _refuse(dropout_p, is_causal)
        q_BLHD, k_BLHD, v_BLHD = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return sample.attend(streams, q_BLHD, k_BLHD, v_BLHD, attn_mask, scale).transpose(1, 2)

    return attend


def _within_sets(sample: SpreadSample, streams: Streams) -> Callable[..., Tensor]:
    """In the place of `skiparse_attention`: ranks exchange heads, and each has whole sets."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, sets: SkiparseSets, kernel: Attend, key_mask: Tensor | None = None
    ) -> Tensor:
        own = partial(skiparse_attention, sets=sets, attend=kernel, key_mask=key_mask)
        if sample.is_spread:
            return sample.attend_to_whole(streams, query, key, value, own)
        return own(query, key, value)

    return attend


def _refuse(dropout_p: float, is_causal: bool) -> None:
    if dropout_p or is_causal:
        raise AttentionError("a generator asks for attention across ranks that is causal, or drops out")


def _functions_with(attend: Callable[..., Tensor]) -> ModuleType:
    """Return a copy of `torch.nn.functional` in which `attend` replaces `scaled_dot_product_attention`."""
    functions = ModuleType(F.__name__)
    functions.__dict__.update(F.__dict__ | {_SDPA: attend})
    return functions
