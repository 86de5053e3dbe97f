"""Context parallelism of image and video generators of diffusers: image tokens are spread, text where it attends with
them; the loss is that of the whole sample on every rank.

Attention goes through diffusers' own dispatcher, by a backend that is set on the processors of this model alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.ops.attention import AttentionError
from mindspeed_mm.fsdp.ops.context_attention.layer import ContextGroups
from mindspeed_mm.fsdp.ops.context_attention.layout import SequenceLayout, build_layout, concatenate_layouts
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import SamplePlan
from mindspeed_mm.fsdp.ops.context_attention.share import CONTEXT_KEY, ContextShare

BACKEND = "mm_context"
Inputs = dict[str, Any]


class SpreadSample:
    """The sample that a generator works on, for its hooks and attention layers.

    It is that of the latest call: the backward pass of a micro-batch ends before the next one begins, so layers that
    are computed again find theirs. A pipeline, which holds several at a time, must not be combined with it.

    Args:
        groups: Who shares a sample.
    """

    def __init__(self, groups: ContextGroups) -> None:
        self._groups = groups
        self.clear()

    def clear(self) -> None:
        """The next sample is whole on this rank."""
        self.image: ContextShare | None = None
        self.text: ContextShare | None = None
        self.attended: ContextShare | None = None
        """The tokens that attend to each other: those of the image, or text and image."""

    def place(self, image_tokens: int, text_tokens: int | None) -> None:
        """Spread a sample.

        Args:
            image_tokens: Of all ranks.
            text_tokens: Given: text is spread too and stands in front of the image, rank by rank.

        Raises:
            DataError: There are fewer tokens than ranks.
        """
        image, text = (None if n is None else self._layout(n) for n in (image_tokens, text_tokens))
        assert image is not None
        self.image = self.attended = ContextShare(self._groups, image)
        if text is not None:
            self.text = ContextShare(self._groups, text)
            self.attended = ContextShare(self._groups, concatenate_layouts(text, image))

    def _layout(self, tokens: int) -> SequenceLayout:
        return spread_layout(tokens, self._groups.ring_size, self._groups.ulysses_size)


def spread_layout(tokens: int, ring: int, ulysses: int) -> SequenceLayout:
    """The layout of tokens over `ring × ulysses` ranks, each of which has some.

    Raises:
        DataError: There are fewer tokens than ranks.
    """
    layout = build_layout(tokens, ring, ulysses)
    if layout.leaves_ranks_empty:
        raise DataError(
            f"a sample of {tokens} tokens cannot be spread over {ring * ulysses} ranks",
            key="parallel.ring_attention_size · parallel.ulysses_parallel_size",
            way_out=f"Let their product be at most {tokens}, or take larger samples.",
        )
    return layout


def require_sample_plan(model: nn.Module) -> SamplePlan:
    """Where a generator's family is cut.

    Raises:
        ConfigError: The family does not say.
    """
    adapter = facts_of(model).adapter
    plan = adapter.sample_plan if adapter is not None else None
    if adapter is None or plan is None:
        raise ConfigError(
            f"{type(model).__name__} cannot spread a sample over ranks",
            key="parallel.ring_attention_size · parallel.ulysses_parallel_size",
            way_out="Set both sizes to 1; its adapter has no sample_plan.",
        )
    return plan


def apply_to_generator(model: nn.Module, groups: ContextGroups) -> None:
    """Let a generator work on a share when the call brings `mm_context`; call it before sharding.

    Args:
        model: Bears its adapter, which says where its family is cut.
        groups: Who shares a sample.
    """
    adapter: Any = facts_of(model).adapter
    plan = require_sample_plan(model)
    sample = SpreadSample(groups)

    def before_model(_: nn.Module, args: tuple[Any, ...], kwargs: Inputs) -> tuple[tuple[Any, ...], Inputs]:
        is_spread = kwargs.pop(CONTEXT_KEY, None) is not None
        sample.clear()
        return args, take_inputs(kwargs, plan, sample, adapter.geometry.tokens) if is_spread else kwargs

    def whole_output(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output if sample.image is None else sample.image.gather(output, plan.gathered[1], sum_gradients=False)

    model.register_forward_pre_hook(before_model, with_kwargs=True)
    for name, dim in plan.module_inputs.items():
        # In front: what else is hooked in works on own tokens.
        model.get_submodule(name).register_forward_pre_hook(partial(_own_input, sample, dim), prepend=True)
    for name, dim in plan.module_outputs.items():
        model.get_submodule(name).register_forward_hook(partial(_own_outputs, sample, dim))
    model.get_submodule(plan.gathered[0]).register_forward_hook(whole_output)
    set_backend(model, sample)


def take_inputs(
    inputs: Inputs, plan: SamplePlan, sample: SpreadSample, tokens_of: Callable[[tuple[int, ...]], int]
) -> Inputs:
    """Arguments of a call with those along image tokens, and along text where it is spread, cut to the own ones.

    Args:
        inputs: Of the whole sample.
        plan: Of the family.
        sample: Is placed here.
        tokens_of: Shape of latents without batch → image tokens, for families that take latents.
    """
    sample.place(*token_counts(inputs, plan, tokens_of))
    own = {key: sample.image.take(inputs[key], dim) for key, dim in plan.image_inputs.items()}  # type: ignore[union-attr]
    if sample.text is not None:
        own |= {key: sample.text.take(inputs[key], dim) for key, dim in plan.text_inputs.items()}
    return inputs | own


def token_counts(
    inputs: Inputs, plan: SamplePlan, tokens_of: Callable[[tuple[int, ...]], int]
) -> tuple[int, int | None]:
    """Tokens of the image and, where it is spread, of the text; arguments as of `take_inputs`."""
    hidden, text = inputs["hidden_states"], inputs["encoder_hidden_states"]
    is_packed = "hidden_states" in plan.image_inputs
    image = hidden.shape[plan.image_inputs["hidden_states"]] if is_packed else tokens_of(tuple(hidden.shape[1:]))
    return image, text.shape[plan.text_inputs["encoder_hidden_states"]] if plan.text_inputs else None


def _own_input(sample: SpreadSample, dim: int, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, *others = args
    return (hidden if sample.image is None else sample.image.take(hidden, dim), *others)


def _own_outputs(
    sample: SpreadSample, dim: int, _: nn.Module, __: Any, outputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    return tuple(each if sample.image is None else sample.image.take(each, dim) for each in outputs)


def set_backend(model: nn.Module, sample: SpreadSample) -> None:
    """Let the attention processors of this model attend across ranks. What they compute on whole sequences
    (cross-attention to text) stays with the backend that they had."""
    for module in model.modules():
        processor = getattr(module, "processor", None)
        if processor is not None and hasattr(processor, "_attention_backend"):
            processor._attention_backend = register_backend(processor._attention_backend)
            processor._parallel_config = sample


def register_backend(whole: Any) -> Any:
    """A backend of diffusers' dispatcher that attends across ranks, and by `whole` where a sequence is whole here.

    diffusers (0.42) has no way to add one: the new member of its enumeration is known to the registry alone, so that
    neither its default nor its list of names changes.

    Args:
        whole: A member of `AttentionBackendName`, or None for the process's own default.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry  # seconds to import

    registry = _AttentionBackendRegistry
    whole = registry.get_active_backend()[0] if whole is None else AttentionBackendName(whole)
    name = f"{BACKEND}_{whole.value}"
    for known in registry._backends:
        if known.value == name:
            return known
    member = str.__new__(AttentionBackendName, name)
    member._name_, member._value_ = name.upper(), name
    attend_whole, taken = registry._backends[whole], registry._supported_arg_names[whole]

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: SpreadSample | None = None,
    ) -> Tensor:
        share = _parallel_config.attended if _parallel_config is not None else None
        how = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        if share is None:
            how |= {"scale": scale, "enable_gqa": enable_gqa}
            return attend_whole(query, key, value, **{name: setting for name, setting in how.items() if name in taken})
        if any(setting is not None and setting for setting in how.values()):
            raise AttentionError(f"a generator asks for attention across ranks with one of {', '.join(how)}")
        return share.attend(query, key, value, causal=False, scale=scale)

    registry.register(member)(attend)
    return member
