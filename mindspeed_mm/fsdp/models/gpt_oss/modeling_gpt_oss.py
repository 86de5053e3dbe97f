"""Registers GPT-OSS. transformers has the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from transformers import GptOssForCausalLM


@model_register.register("gpt_oss")
def gpt_oss() -> type[GptOssForCausalLM]:
    """transformers' own class, which keeps its name and its rules for stored weights."""
    from transformers import GptOssForCausalLM  # seconds to import

    return GptOssForCausalLM
