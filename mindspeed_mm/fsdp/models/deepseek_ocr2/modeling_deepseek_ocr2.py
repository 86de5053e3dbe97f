"""Registers DeepSeek-OCR2. transformers has the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from transformers import DeepseekOcr2ForConditionalGeneration


@model_register.register("deepseek_ocr2")
def deepseek_ocr2() -> type[DeepseekOcr2ForConditionalGeneration]:
    """transformers' own class, which keeps its name and its rules for stored weights."""
    from transformers import DeepseekOcr2ForConditionalGeneration  # seconds to import

    return DeepseekOcr2ForConditionalGeneration
