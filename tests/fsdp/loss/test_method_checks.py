"""Families of generators that rewards cannot teach."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.model_kinds import LANGUAGE
from mindspeed_mm.fsdp.loss.method_checks import (
    check_distilled_generator,
    check_generator_settings,
    check_method,
    check_rewarded_generator,
)
from mindspeed_mm.fsdp.params.posttrain_args import DmdArguments, GrpoArguments


def family(
    *,
    is_flow: bool = True,
    further: tuple[str, ...] = (),
    task: str = "t2v",
    parts: tuple[str, ...] = ("transformer",),
    given: tuple[str, ...] = (),
) -> Any:
    path = SimpleNamespace(is_flow=is_flow, describe=lambda: "predicting noise")
    return SimpleNamespace(
        noise_path=path, further_latents=further, task=task, transformers=parts, draws_blocks=False,
        takes_guidance=True, media_roles=[SimpleNamespace(name=name) for name in given],
        distilled_tasks={"t2v", *(["i2v"] if given else [])},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("adapter", "words", "key"),
    [
        (family(is_flow=False), "Identity learns by predicting noise", "posttrain.method"),
        (family(further=("audio_latents",)), "Identity has audio_latents beside", "posttrain.method"),
        (family(task="i2v"), "'i2v' goes on from media", "model.task"),
    ],
)
def test_refusals(adapter: Any, words: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rewarded_generator("grpo", adapter, nn.Identity())
    assert words in str(caught.value) and key in str(caught.value)


@pytest.mark.parametrize(
    ("adapter", "words", "key"),
    [
        (family(task="i2v"), "'i2v' goes on from media", "model.task"),
        (family(parts=("transformer", "transformer_2")), "Identity is two", "posttrain.method"),
        (family(), "3, but Identity is not drawn in blocks of frames", "posttrain.dmd.num_frame_per_block"),
        (family(task="i2v", given=("first_frame",)), "3, but 'i2v' is not drawn", "posttrain.dmd.num_frame_per_block"),
    ],
)
def test_students_that_cannot_be(adapter: Any, words: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_distilled_generator(DmdArguments(num_frame_per_block=3), adapter, nn.Identity())
    assert words in str(caught.value) and key in str(caught.value)
    with pytest.raises(ConfigError, match=r"negative_prompt.*'blurred' has no effect"):
        check_distilled_generator(DmdArguments(negative_prompt="blurred"), family(), nn.Identity())
    for taught in (family(), family(task="i2v", given=("first_frame",))):
        check_distilled_generator(DmdArguments(), taught, nn.Identity())


def test_a_student_that_goes_on_from_media_needs_rows_with_them() -> None:
    adapter = family(task="i2v", given=("first_frame", "last_frame"))
    with pytest.raises(ConfigError, match=r"'generation_prompts' .* goes on from first_frame and last_frame"):
        check_distilled_generator(DmdArguments(), adapter, nn.Identity(), "generation_prompts")
    check_distilled_generator(DmdArguments(), family(), nn.Identity(), "generation_prompts")


def test_an_entropy_of_tokens_that_there_are_not() -> None:
    check_generator_settings(GrpoArguments(beta=0.04))
    with pytest.raises(ConfigError, match=r"0\.01, but samples of a generator are made of no tokens") as caught:
        check_generator_settings(GrpoArguments(entropy_coef=0.01))
    assert "posttrain.grpo.entropy_coef" in str(caught.value)


def test_a_model_that_answers_has_to_generate() -> None:
    model = nn.Identity()
    check_method("dpo", LANGUAGE, model, has_head=True)
    with pytest.raises(ConfigError, match="Identity has no `generate`"):
        check_method("grpo", LANGUAGE, model, has_head=True)
    model.generate = lambda: None  # type: ignore[assignment]
    check_method("grpo", LANGUAGE, model, has_head=True)


def test_one_stream_from_a_prompt_is_taught() -> None:
    check_rewarded_generator("grpo", family(), nn.Identity())
    check_rewarded_generator("nft", family(task="t2i"), nn.Identity())
