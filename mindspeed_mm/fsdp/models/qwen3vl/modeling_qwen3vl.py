"""Registers Qwen3-VL (dense). transformers has the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from transformers import Qwen3VLForConditionalGeneration


@model_register.register("qwen3_vl")
def qwen3_vl() -> type[Qwen3VLForConditionalGeneration]:
    """transformers' own class, which keeps its name and its rules for stored weights."""
    from transformers import Qwen3VLForConditionalGeneration  # seconds to import

    return Qwen3VLForConditionalGeneration
