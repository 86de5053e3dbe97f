"""Registers Qwen3.5 and 3.6, dense. transformers has the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from transformers import Qwen3_5ForConditionalGeneration


@model_register.register("qwen3_5")
def qwen3_5() -> type[Qwen3_5ForConditionalGeneration]:
    """transformers' own class, which keeps its name and its rules for stored weights."""
    from transformers import Qwen3_5ForConditionalGeneration  # seconds to import

    return Qwen3_5ForConditionalGeneration
