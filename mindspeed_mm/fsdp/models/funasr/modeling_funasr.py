"""Registers Fun-ASR-Nano. transformers has the whole model; its sound comes from `fsdp/utils/fun_asr_features.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from transformers import FunAsrNanoForConditionalGeneration


@model_register.register("funasr")
def funasr() -> type[FunAsrNanoForConditionalGeneration]:
    """transformers' own class, which keeps its name and its rules for stored weights."""
    from transformers import FunAsrNanoForConditionalGeneration  # seconds to import

    return FunAsrNanoForConditionalGeneration
