"""Families of generators that rewards cannot teach."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.loss.method_checks import check_rewarded_generator


def family(*, is_flow: bool = True, further: tuple[str, ...] = (), task: str = "t2v") -> Any:
    path = SimpleNamespace(is_flow=is_flow, describe=lambda: "predicting noise")
    return SimpleNamespace(noise_path=path, further_latents=further, task=task)


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


def test_one_stream_from_a_prompt_is_taught() -> None:
    check_rewarded_generator("grpo", family(), nn.Identity())
    check_rewarded_generator("nft", family(task="t2i"), nn.Identity())
