"""Registers Qwen3-Omni's thinker. transformers has the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration


@model_register.register("qwen3_omni_moe")
def qwen3_omni_moe() -> type[Qwen3OmniMoeThinkerForConditionalGeneration]:
    """transformers' own class, which keeps its name and its rules for stored weights."""
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration  # seconds to import

    return Qwen3OmniMoeThinkerForConditionalGeneration
