"""Registers Kimi-K2.5. transformers has the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from transformers import Kimi_K25ForConditionalGeneration


@model_register.register("kimi_k25")
def kimi_k25() -> type[Kimi_K25ForConditionalGeneration]:
    """transformers' own class, which keeps its name and its rules for stored weights."""
    from transformers import Kimi_K25ForConditionalGeneration  # seconds to import

    return Kimi_K25ForConditionalGeneration
