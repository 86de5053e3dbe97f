"""Registers Janus-Pro. transformers has the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from transformers import JanusForConditionalGeneration


@model_register.register("janus")
def janus() -> type[JanusForConditionalGeneration]:
    """transformers' own class, which keeps its name and its rules for stored weights."""
    from transformers import JanusForConditionalGeneration  # seconds to import

    return JanusForConditionalGeneration
