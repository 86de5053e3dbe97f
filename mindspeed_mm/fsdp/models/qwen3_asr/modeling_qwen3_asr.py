"""Registers Qwen3-ASR. transformers has the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from transformers import Qwen3ASRForConditionalGeneration


@model_register.register("qwen3_asr")
def qwen3_asr() -> type[Qwen3ASRForConditionalGeneration]:
    """transformers' own class, which keeps its name and its rules for stored weights."""
    from transformers import Qwen3ASRForConditionalGeneration  # seconds to import

    return Qwen3ASRForConditionalGeneration
