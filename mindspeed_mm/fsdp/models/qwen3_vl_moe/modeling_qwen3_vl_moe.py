"""Registers Qwen3-VL, mixture of experts. transformers has the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from transformers import Qwen3VLMoeForConditionalGeneration


@model_register.register("qwen3_vl_moe")
def qwen3_vl_moe() -> type[Qwen3VLMoeForConditionalGeneration]:
    """transformers' own class, which keeps its name and its rules for stored weights."""
    from transformers import Qwen3VLMoeForConditionalGeneration  # seconds to import

    return Qwen3VLMoeForConditionalGeneration
