"""BAGEL: MindSpeed-MM's folder of one rank names the released tensors by its own modules."""

from __future__ import annotations

from typing_extensions import override

from mindspeed_mm.checkpoint.original.lumina import LuminaConverter
from mindspeed_mm.core.errors import CheckpointError

_TOWER, _BLOCKS = "vit_model.vision_model", "vit_model.vision_model.encoder.layers."
_PARTS = (
    ("language_model.model.", "mllm.decoder."),
    ("language_model.lm_head.", "mllm.lm_head."),
    ("connector.fc", "image_encoder.projector.linear_fc"),
    ("llm2vae.", "mllm.llm2vae."),
    ("vae2llm.", "mllm.vae2llm."),
    ("time_embedder.mlp.", "mllm.time_embedder.time_embed."),
    (f"{_TOWER}.embeddings.", "image_encoder.encoder.patch_embed."),
    (f"{_TOWER}.post_layernorm.", "image_encoder.encoder.norm."),
    (_BLOCKS, "image_encoder.encoder.blocks."),
    ("vit_pos_embed.", "mllm.vit_pos_embed."),
    ("latent_pos_embed.", "latent_pos_embed."),
)
"""Beginning of a released name → of MindSpeed-MM's."""
_OF_BLOCKS = ((".layer_norm", ".norm"), (".self_attn.", ".attn."))


class BagelConverter(LuminaConverter):
    """BAGEL: the released folder ↔ MindSpeed-MM's folder."""

    family = "BAGEL"

    @override
    def theirs(self, name: str) -> str:
        for released, own in _PARTS:
            if name.startswith(released):
                rest = name.removeprefix(released)
                for before, after in _OF_BLOCKS if released == _BLOCKS else ():
                    rest = rest.replace(before, after)
                return own + rest
        raise _unknown(name)

    @override
    def ours(self, name: str) -> str:
        for released, own in _PARTS:
            if name.startswith(own):
                rest = name.removeprefix(own)
                for before, after in _OF_BLOCKS if released == _BLOCKS else ():
                    rest = rest.replace(after, before)
                return released + rest
        raise _unknown(name)


def _unknown(name: str) -> CheckpointError:
    return CheckpointError(f"'{name}' is no tensor of BAGEL", way_out="Name a folder of BAGEL-7B-MoT.")
