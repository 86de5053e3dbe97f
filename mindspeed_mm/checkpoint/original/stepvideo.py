"""Step-Video's transformer.

Names: stepfun-ai/Step-Video-T2V (`modules/model.py`), which are those that train here, and MindSpeed-MM's
`StepVideoConverter` and `step_video_dit.py`.
"""

from __future__ import annotations

from mindspeed_mm.checkpoint.key_ops import ByHead
from mindspeed_mm.checkpoint.keymap import KeyRule
from mindspeed_mm.checkpoint.original.generator import GeneratorLayouts, Json, Naming, Tensors, count, modules

_HEAD = 128
"""Features of a head: of the released models, and in MindSpeed-MM's converter."""
_LAYER = "transformer_blocks.{n}."
_TIMES = "adaln_single.emb."
_OUTSIDE = (
    "pos_embed.proj", "adaln_single.linear", "caption_projection.linear_1", "caption_projection.linear_2",
    "clip_projection", "proj_out", *(f"{_TIMES}{part}.linear_{number}" for part in
    ("timestep_embedder", "motion_score_embedder") for number in (1, 2)),
)  # fmt: skip
_IN_LAYER = {
    **{name: name for name in ("norm1", "norm2", "ff.net.0.proj", "ff.net.2")},
    **{f"attn{n}.{part}_norm": f"attn{n}.{part}_norm" for n in (1, 2) for part in "qk"},
    "attn1.proj_out": "attn1.wo",
    "attn2.proj_out": "attn2.wo",
    "attn2.proj_q": "attn2.wq",
}


def _config(tensors: Tensors, given: Json) -> Json:
    dim, inputs, patch, _ = tensors["pos_embed.proj.weight"].shape
    head_dim = tensors["transformer_blocks.0.attn1.q_norm.weight"].shape[0]
    is_told_motion = f"{_TIMES}motion_score_embedder.linear_1.weight" in tensors
    words = tensors["caption_projection.linear_1.weight"].shape[1]
    channels = inputs
    if is_told_motion:  # the first picture's latents stand beside those that are denoised
        channels = inputs // 2
    return {
        "num_attention_heads": dim // head_dim,
        "attention_head_dim": head_dim,
        "in_channels": channels,
        "out_channels": tensors["proj_out.weight"].shape[0] // patch**2,
        "num_layers": count(tensors, "transformer_blocks."),
        "patch_size": patch,
        "use_additional_conditions": is_told_motion,
        "caption_channels": [words, tensors["clip_projection.weight"].shape[1]],
    }


def _version(tensors: Tensors) -> str:
    is_told_motion = f"{_TIMES}motion_score_embedder.linear_1.weight" in tensors
    return f"Step-Video {'TI2V' if is_told_motion else 'T2V'}"


STEP_VIDEO = GeneratorLayouts(
    name="Step-Video",
    class_name="StepVideoModel",
    marks={
        Naming.DIFFUSERS: ("clip_projection.weight", "transformer_blocks.0.attn1.wqkv.weight"),
        Naming.MM: ("clip_projection.weight", "transformer_blocks.0.attn1.proj_qkv.weight"),
    },
    original=(KeyRule("{name*}", "{name*}"), KeyRule("{name}", "{name}")),
    mm=(
        *modules({name: name for name in _OUTSIDE}),
        KeyRule("scale_shift_table", "scale_shift_table"),
        KeyRule(f"{_LAYER}scale_shift_table", f"{_LAYER}scale_shift_table"),
        *modules(_IN_LAYER, _LAYER, _LAYER),
        KeyRule(f"{_LAYER}attn1.proj_qkv.weight", f"{_LAYER}attn1.wqkv.weight", (ByHead(0, 3, _HEAD),)),
        KeyRule(f"{_LAYER}attn2.proj_kv.weight", f"{_LAYER}attn2.wkv.weight", (ByHead(0, 2, _HEAD),)),
    ),
    config=_config,
    version=_version,
)
