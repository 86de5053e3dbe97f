"""CogVideoX 1.0 and 1.5.

Names: https://github.com/zai-org/CogVideo (`sat/dit_video_concat.py`), diffusers' `cogvideox_transformer_3d.py` and its
script `convert_cogvideox_to_diffusers.py`, MindSpeed-MM's `CogVideoConverter`.
"""

from __future__ import annotations

from mindspeed_mm.checkpoint.key_ops import ReorderParts, Split
from mindspeed_mm.checkpoint.keymap import KeyRule
from mindspeed_mm.checkpoint.original.generator import GeneratorLayouts, Json, Naming, Tensors, count, fused, modules

_OUTSIDE = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "ofs_embed.0": "ofs_embedding.linear_1",
    "ofs_embed.2": "ofs_embedding.linear_2",
    "mixins.patch_embed.proj": "patch_embed.proj",
    "mixins.patch_embed.text_proj": "patch_embed.text_proj",
    "transformer.final_layernorm": "norm_final",
    "mixins.final_layer.norm_final": "norm_out.norm",
    "mixins.final_layer.adaLN_modulation.1": "norm_out.linear",
    "mixins.final_layer.linear": "proj_out",
}
_MM_OUTSIDE = {
    "time_embed.time_embed.0": "time_embedding.linear_1",
    "time_embed.time_embed.2": "time_embedding.linear_2",
    "ofs_embed.0": "ofs_embedding.linear_1",
    "ofs_embed.2": "ofs_embedding.linear_2",
    "patch_embed.proj": "patch_embed.proj",
    "caption_projection": "patch_embed.text_proj",
    "norm_final": "norm_final",
    "norm_out": "norm_out.norm",
    "adaLN_modulation.1": "norm_out.linear",
    "proj_out_linear": "proj_out",
}
_IN_LAYER = {
    "input_layernorm": "norm1.norm",
    "attention.dense": "attn1.to_out.0",
    "post_attention_layernorm": "norm2.norm",
    "mlp.dense_h_to_4h": "ff.net.0.proj",
    "mlp.dense_4h_to_h": "ff.net.2",
}
_MM_IN_LAYER = {
    "self_atten.q_norm": "attn1.norm_q",
    "self_atten.k_norm": "attn1.norm_k",
    "norm1": "norm1.norm",
    "self_atten.proj_out": "attn1.to_out.0",
    "norm2": "norm2.norm",
    "ff.net.0.proj": "ff.net.0.proj",
    "ff.net.2": "ff.net.2",
}
_LAYER = "transformer_blocks.{n}."
_QKV = [f"{_LAYER}attn1.to_{name}" for name in "qkv"]


def _modulation(source: str) -> KeyRule:
    """The authors' modulation of a layer: shift, scale and gate before attention and before the projections, of the
    video, then the same six of the text. diffusers' has one module for attention and one for the projections."""
    # (video 1, video 2, text 1, text 2) → (video 1, text 1, video 2, text 2), three parts each
    order = (0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11)
    targets = [f"{_LAYER}norm1.linear.{{part}}", f"{_LAYER}norm2.linear.{{part}}"]
    return KeyRule(f"{source}.{{part}}", targets, (ReorderParts(0, order), Split(0, parts=2)))


def _config(tensors: Tensors, given: Json) -> Json:
    patches = tensors["patch_embed.proj.weight"].shape
    dim, head_dim = patches[0], tensors["transformer_blocks.0.attn1.norm_q.weight"].shape[0]
    is_1_5 = len(patches) == 2  # a linear layer over patches that also span frames
    patch, in_channels = 2, patches[1]
    patch_t: int | None = None
    per_patch = patch * patch
    if is_1_5:
        patch_t = 2
        per_patch *= patch_t
        in_channels //= per_patch
    # 30 heads of 64: the 2B
    is_rotary = dim != 30 * 64
    config: Json = {
        "num_attention_heads": dim // head_dim,
        "attention_head_dim": head_dim,
        "in_channels": in_channels,
        "out_channels": tensors["proj_out.weight"].shape[0] // per_patch,
        "time_embed_dim": tensors["time_embedding.linear_1.weight"].shape[0],
        "text_embed_dim": tensors["patch_embed.text_proj.weight"].shape[1],
        "num_layers": count(tensors, "transformer_blocks."),
        "patch_size": patch,
        "patch_size_t": patch_t,
        # The 2B alone has sine and cosine positions; its authors' file holds them, diffusers computes them.
        "use_rotary_positional_embeddings": is_rotary,
        "use_learned_positional_embeddings": is_rotary and "patch_embed.pos_embedding" in tensors,
        "ofs_embed_dim": None,
    }
    if "ofs_embedding.linear_1.weight" in tensors:
        config["ofs_embed_dim"] = tensors["ofs_embedding.linear_1.weight"].shape[1]
    if is_1_5:
        # 1.5's release: 1360 × 768 pixels, 8 to a latent, and 81 frames; shapes do not tell them.
        config |= {"sample_width": 170, "sample_height": 96, "sample_frames": 81, "patch_bias": True}
    return config


def _version(tensors: Tensors) -> str:
    patches = tensors["patch_embed.proj.weight"].shape
    if len(patches) == 2:
        release, inputs_of_i2v = "1.5", 256
    else:
        release, inputs_of_i2v = "1.0", 32
    is_i2v = "ofs_embedding.linear_1.weight" in tensors or patches[1] == inputs_of_i2v
    task = "I2V" if is_i2v else "T2V"
    return f"CogVideoX {release} {task}"


_BUFFERS = "is computed anew from the configuration"
COGVIDEOX = GeneratorLayouts(
    name="CogVideoX",
    class_name="CogVideoXTransformer3DModel",
    marks={
        Naming.DIFFUSERS: ("patch_embed.text_proj.weight", "transformer_blocks.0.attn1.to_q.weight"),
        Naming.ORIGINAL: ("mixins.final_layer.linear.weight", "transformer.layers.0.attention.query_key_value.weight"),
        Naming.MM: ("caption_projection.weight", "videodit_blocks.0.self_atten.proj_qkv.weight"),
    },
    original=(
        *modules(_OUTSIDE),
        KeyRule("mixins.pos_embed.pos_embedding", "patch_embed.pos_embedding"),
        *modules(_IN_LAYER, "transformer.layers.{n}.", _LAYER),
        KeyRule("mixins.adaln_layer.query_layernorm_list.{n}.{part}", f"{_LAYER}attn1.norm_q.{{part}}"),
        KeyRule("mixins.adaln_layer.key_layernorm_list.{n}.{part}", f"{_LAYER}attn1.norm_k.{{part}}"),
        fused("transformer.layers.{n}.attention.query_key_value", _QKV),
        _modulation("mixins.adaln_layer.adaLN_modulations.{n}.1"),
    ),
    mm=(
        *modules(_MM_OUTSIDE),
        KeyRule("pos_embed.pos_embedding", "patch_embed.pos_embedding"),
        *modules(_MM_IN_LAYER, "videodit_blocks.{n}.", _LAYER),
        fused("videodit_blocks.{n}.self_atten.proj_qkv", _QKV),
        _modulation("videodit_blocks.{n}.scale_shift_table.1"),
    ),
    config=_config,
    version=_version,
    original_prefix="model.diffusion_model.",
    original_file="1/mp_rank_00_model_states.pt",
    original_texts={"latest": "1"},
    left_out={
        "mixins.pos_embed.freqs_": _BUFFERS,
        "pos_embed.freqs_": _BUFFERS,
        "mixins.pos_embed.position_embedding": _BUFFERS,
        "transformer.word_embeddings": "is unused: the text comes from an encoder",
        "transformer.embed_tokens": "is unused: the text comes from an encoder",
        "first_stage_model.": "belongs to the VAE",
        "conditioner.": "belongs to the text encoder",
    },
)
