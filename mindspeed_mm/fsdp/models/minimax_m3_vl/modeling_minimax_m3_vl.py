"""Registers MiniMax-M3-VL. transformers has the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from transformers import MiniMaxM3SparseForConditionalGeneration


@model_register.register("minimax_m3_vl")
def minimax_m3_vl() -> type[MiniMaxM3SparseForConditionalGeneration]:
    """transformers' own class, which keeps its name and its rules for stored weights."""
    from transformers import MiniMaxM3SparseForConditionalGeneration  # seconds to import

    return MiniMaxM3SparseForConditionalGeneration
