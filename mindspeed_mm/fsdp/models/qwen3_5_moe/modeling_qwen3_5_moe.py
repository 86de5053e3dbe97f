"""Registers Qwen3.5 and 3.6, mixture of experts. transformers has the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from transformers import Qwen3_5MoeForConditionalGeneration


@model_register.register("qwen3_5_moe")
def qwen3_5_moe() -> type[Qwen3_5MoeForConditionalGeneration]:
    """transformers' own class, which keeps its name and its rules for stored weights."""
    from transformers import Qwen3_5MoeForConditionalGeneration  # seconds to import

    return Qwen3_5MoeForConditionalGeneration
