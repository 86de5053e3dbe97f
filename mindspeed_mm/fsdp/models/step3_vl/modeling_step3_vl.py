"""Registers Step-3.7. transformers has the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from transformers import Step3p7ForConditionalGeneration


@model_register.register("step3_vl")
def step3_vl() -> type[Step3p7ForConditionalGeneration]:
    """transformers' own class, which keeps its name and its rules for stored weights."""
    from transformers import Step3p7ForConditionalGeneration  # seconds to import

    return Step3p7ForConditionalGeneration
