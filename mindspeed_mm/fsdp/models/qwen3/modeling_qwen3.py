"""Registers Qwen3, dense. transformers has the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


@model_register.register("qwen3")
def qwen3() -> type[Qwen3ForCausalLM]:
    """transformers' own class, which keeps its name and its rules for stored weights."""
    from transformers import Qwen3ForCausalLM  # seconds to import

    return Qwen3ForCausalLM
