"""Registers CosyVoice3's language model with this suite and with transformers' Auto classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.models.cosyvoice3.language_model import CosyVoice3LM


@model_register.register("cosyvoice3_lm")
def cosyvoice3_lm() -> type[CosyVoice3LM]:
    """Our class, on the blocks of transformers' Qwen2."""
    from mindspeed_mm.fsdp.models.cosyvoice3.language_model import CosyVoice3LM  # transformers: seconds to import

    return CosyVoice3LM


def tell_transformers() -> None:
    """Let transformers' Auto classes find the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from mindspeed_mm.fsdp.models.cosyvoice3.language_model import CosyVoice3Config, CosyVoice3LM

    AutoConfig.register(CosyVoice3Config.model_type, CosyVoice3Config, exist_ok=True)
    AutoModelForCausalLM.register(CosyVoice3Config, CosyVoice3LM, exist_ok=True)
