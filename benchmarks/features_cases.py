"""The features that are measured, and the model that they are measured on. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.communication_formula import Decoder

ROWS = 2
TOKENS_A_ROW = 256
MORE_ROWS = 8
"""Where activations are part of the peak, for features that are about them."""
PREDICTED_ROWS = 4
PREDICTED_TOKENS_A_ROW = 2048
"""Where activations, not the optimizer's update, are the peak."""
WARM_UP_STEPS = 1
MEASURED_STEPS = 1

SHAPE = Decoder(
    layers=18, hidden=1024, intermediate=3072, heads=16, key_heads=8, head_width=128, vocabulary=32_768, tied=True
)
"""Qwen3's 0.6 B with fewer layers and words: 0.32 B parameters."""

RECOMPUTE = "features.recompute=true"
SELECTIVE = "features.recompute_plan.mode=selective"
CHUNKS = ("features.enable_chunk_loss=true", "features.chunkloss_plan.chunk_size=128")
BF16_STATES = "training.optimizer_state_dtype=bf16"
LORA = ("training.lora.enable=true", "training.lora.target_modules=[q_proj,k_proj,v_proj]")


@dataclass(frozen=True)
class Feature:
    """One configuration beside the plain one.

    Args:
        words: What switches it on.
        same_loss: Whether it changes nothing of what is computed: its losses are compared.
    """

    words: tuple[str, ...]
    same_loss: bool = True


OFF = "off"
"""What optimizers keep, and where, is measured by `optimizer_states`; the loss alone, at a large vocabulary, by
`chunk_loss`."""
FEATURES = {
    "recompute, full": Feature((RECOMPUTE,)),
    "recompute, selective": Feature((RECOMPUTE, SELECTIVE)),
    "recompute, attention kept": Feature((RECOMPUTE, "model.skip_flash_attn_recompute=true")),
    "activation offload": Feature(("features.enable_activation_offload=true",)),
    "chunk_mbs, 1 of 2 rows": Feature(
        ("features.enable_chunk_mbs=true", "features.chunkmbs_plan.apply_modules=['model.layers.{*}.mlp']")
    ),
    "chunked loss": Feature(CHUNKS),
    "lora": Feature(LORA, same_loss=False),
    "dora": Feature((*LORA, "training.lora.use_dora=true"), same_loss=False),
    "lora on nf4": Feature((*LORA, "training.lora.quantize=nf4"), same_loss=False),
    "compiled blocks": Feature(("features.compile=true",)),
    "recompute + chunked loss + bf16 states": Feature((RECOMPUTE, *CHUNKS, BF16_STATES), same_loss=False),
}
OF_ACTIVATIONS = (OFF, "recompute, full", "recompute, selective", "recompute, attention kept", "chunked loss")
"""Measured with more rows as well."""
