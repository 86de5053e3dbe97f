"""Whether a model can be trained by a method of post-training."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.model_kinds import ModelKind
from mindspeed_mm.fsdp.params.posttrain_args import BUILT_METHODS, DmdArguments, GrpoArguments
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter

_KEY = "posttrain.method"
_FROM_A_PROMPT = ("t2i", "t2v")
"""Tasks of generators that need nothing but a prompt."""


def check_method(method: str, kind: ModelKind, model: nn.Module, *, has_head: bool) -> None:
    """Raise `ConfigError` unless this version has the method for such a model, and the model computes the same
    probabilities each time.

    Args:
        method: `posttrain.method`.
        kind: Of the model.
        model: Whole; parameters may be on meta.
        has_head: Whether it has an output head that makes logits of a vocabulary.
    """
    if method not in BUILT_METHODS[kind.name]:
        raise ConfigError(
            f"'{method}' is not in this version for a {kind.name} model ({type(model).__name__})",
            key=_KEY,
            way_out=f"For such models there is: {', '.join(BUILT_METHODS[kind.name]) or 'supervised training'}.",
        )
    if kind.has_tokens and not has_head:
        raise ConfigError(
            f"'{method}' needs the probabilities of tokens, and {type(model).__name__} has no output head that makes "
            "logits of a vocabulary",
            key=_KEY,
            way_out="Leave it out.",
        )
    if method == "grpo" and kind.has_tokens and not callable(attribute_at(model, "generate")):
        raise ConfigError(
            f"{type(model).__name__} has no `generate`",
            key=_KEY,
            way_out="grpo needs a language model of transformers.",
        )
    found = next(_dropouts(model), None)
    if found is not None:
        name, rate = found
        raise ConfigError(
            f"'{method}' compares probabilities, and {type(model).__name__} has a dropout of {rate:g} in {name}",
            key=_KEY,
            way_out="Set the dropout rates in the model's config.json to 0.",
        )


def check_rewarded_generator(
    method: str, adapter: DiffusionAdapter, model: nn.Module, tasks: Collection[str] = _FROM_A_PROMPT
) -> None:
    """Raise `ConfigError` unless rewards can teach this family: it draws one stream of latents from a prompt alone, by
    steps that have densities.

    Args:
        method: `posttrain.method`.
        adapter: The family's `DiffusionAdapter`.
        model: Its transformer.
        tasks: That the method can teach.
    """
    family = type(model).__name__
    if not adapter.noise_path.is_flow:
        raise ConfigError(
            f"'{method}' needs a model that matches flows, and {family} learns by {adapter.noise_path.describe()}",
            key=_KEY,
            way_out="Choose another model.",
        )
    if adapter.further_latents:
        raise ConfigError(
            f"'{method}' teaches one stream of latents, and {family} has {', '.join(adapter.further_latents)} beside",
            key=_KEY,
            way_out="Choose a task or a model without them.",
        )
    if adapter.task not in tasks:
        raise ConfigError(
            f"'{adapter.task}' goes on from media, and the prompts of '{method}' have none",
            key="model.task",
            way_out=f"Set {' or '.join(sorted(tasks))}, where the folder allows it.",
        )


def check_distilled_generator(
    dmd: DmdArguments, adapter: DiffusionAdapter, model: nn.Module, dataset_type: str = "generation"
) -> None:
    """Raise `ConfigError` unless a student of this family can draw in few steps, and in blocks where that is asked for.

    Args:
        dmd: `posttrain.dmd`.
        adapter: The family's `DiffusionAdapter`.
        model: Its transformer.
        dataset_type: Of the rows.
    """
    check_rewarded_generator("dmd", adapter, model, adapter.distilled_tasks)
    if adapter.media_roles and dataset_type == "generation_prompts":
        raise ConfigError(
            f"'{dataset_type}' reads prompts without media, and '{adapter.task}' goes on from "
            f"{' and '.join(role.name for role in adapter.media_roles)}",
            key="data.dataset_param.dataset_type",
            way_out="Set it to generation, whose rows have clips.",
        )
    if adapter.media_roles and dmd.num_frame_per_block is not None:
        raise ConfigError(
            f"{dmd.num_frame_per_block}, but '{adapter.task}' is not drawn in blocks of frames",
            key="posttrain.dmd.num_frame_per_block",
            way_out="Leave it out, or choose t2v.",
        )
    if len(adapter.transformers) > 1:
        raise ConfigError(
            f"'dmd' distils one transformer, and {type(model).__name__} is two, each for some noise levels",
            key=_KEY,
            way_out="Choose another model.",
        )
    if dmd.negative_prompt and adapter.takes_guidance:
        raise ConfigError(
            f"'{dmd.negative_prompt:.80}' has no effect: {type(model).__name__} takes guidance as an input, and is "
            "guided away from no prompt",
            key="posttrain.dmd.negative_prompt",
            way_out="Leave it out.",
        )
    if dmd.num_frame_per_block is not None and not adapter.draws_blocks:
        raise ConfigError(
            f"{dmd.num_frame_per_block}, but {type(model).__name__} is not drawn in blocks of frames",
            key="posttrain.dmd.num_frame_per_block",
            way_out="Leave it out, or choose a family that is: docs/generation.md names it.",
        )


def check_paired_generator(adapter: DiffusionAdapter, model: nn.Module) -> None:
    """Raise `ConfigError` unless preference pairs can teach this family: it learns one stream of latents.

    Args:
        adapter: The family's `DiffusionAdapter`.
        model: Its transformer.
    """
    if adapter.further_latents:
        raise ConfigError(
            f"'dpo' compares one stream of latents, and {type(model).__name__} has "
            f"{', '.join(adapter.further_latents)} beside",
            key=_KEY,
            way_out="Choose a task or a model without them.",
        )


def check_generator_settings(grpo: GrpoArguments) -> None:
    """Raise `ConfigError` when a setting asks for what only language models have."""
    if grpo.entropy_coef:
        raise ConfigError(
            f"{grpo.entropy_coef:g}, but samples of a generator are made of no tokens, whose entropy could be raised",
            key="posttrain.grpo.entropy_coef",
            way_out="Leave it out; posttrain.flow.noise_level makes samples differ.",
        )


def _dropouts(model: nn.Module) -> Iterator[tuple[str, float]]:
    for name, module in model.named_modules():
        rate = attribute_at(module, "attention_dropout", 0.0)
        if isinstance(module, nn.Dropout):
            rate = module.p
        if isinstance(rate, float) and rate > 0:
            yield name or "its root", rate
