"""Registers Qwen3, mixture of experts. transformers has the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from transformers import Qwen3MoeForCausalLM


@model_register.register("qwen3_moe")
def qwen3_moe() -> type[Qwen3MoeForCausalLM]:
    """transformers' own class, which keeps its name and its rules for stored weights."""
    from transformers import Qwen3MoeForCausalLM  # seconds to import

    return Qwen3MoeForCausalLM
