"""LTX-Video, and LTX-2 with its sound.

Names: https://github.com/Lightricks/LTX-Video, https://github.com/Lightricks/LTX-2, diffusers' `transformer_ltx.py` and
`transformer_ltx2.py`. One file of the authors holds the whole pipeline; the transformer is what becomes a folder here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_mm.checkpoint.keymap import KeyRule, renamings
from mindspeed_mm.checkpoint.original.generator import GeneratorLayouts, Json, Naming, Tensors, count, modules

_HEADS = 32
"""Of every released size; the width of a head is what differs."""
_BLOCK = "transformer_blocks.{n}."
_PREFIX = "model.diffusion_model."
_OTHER_PARTS = {
    "vae.": "belongs to the VAE",
    "audio_vae.": "belongs to the sound's VAE",
    "vocoder.": "belongs to the vocoder",
    "text_embedding_projection.": "belongs to the connectors of the text encoder",
    "video_embeddings_connector.": "belongs to the connectors of the text encoder",
    "audio_embeddings_connector.": "belongs to the connectors of the text encoder",
}


def _attention() -> list[KeyRule]:
    same = ("to_q", "to_k", "to_v", "to_out.0", "to_gate_logits")
    names = _unchanged([f"{{attention}}.{name}" for name in same])
    norms = {"{attention}.q_norm": "{attention}.norm_q", "{attention}.k_norm": "{attention}.norm_k"}
    return modules(norms | names, _BLOCK)


def _unchanged(names: Sequence[str]) -> dict[str, str]:
    return dict(zip(names, names, strict=True))


def _same(*names: str) -> list[KeyRule]:
    return renamings(_unchanged(names), end="")


def _feed_forward(*names: str) -> list[KeyRule]:
    linears = []
    for name in names:
        linears += [f"{name}.net.0.proj", f"{name}.net.2"]
    return modules(_unchanged(linears), _BLOCK)


def _captions(*names: str) -> list[KeyRule]:
    linears = []
    for name in names:
        linears += [f"{name}.linear_1", f"{name}.linear_2"]
    return modules(_unchanged(linears))


def _modulations(names: Mapping[str, str]) -> list[KeyRule]:
    return renamings(names, end=".{rest*}")


def _config(tensors: Tensors, given: Json) -> Json:
    dim, in_channels = tensors["proj_in.weight"].shape
    return {
        "in_channels": in_channels,
        "out_channels": tensors["proj_out.weight"].shape[0],
        "num_attention_heads": _HEADS,
        "attention_head_dim": dim // _HEADS,
        "cross_attention_dim": tensors["transformer_blocks.0.attn2.to_k.weight"].shape[1],
        "num_layers": count(tensors, "transformer_blocks."),
        "caption_channels": tensors["caption_projection.linear_1.weight"].shape[1],
    }


def _config_of_2(tensors: Tensors, given: Json) -> Json:
    audio_dim, audio_channels = tensors["audio_proj_in.weight"].shape
    block = "transformer_blocks.0."
    config = {
        "in_channels": tensors["proj_in.weight"].shape[1],
        "out_channels": tensors["proj_out.weight"].shape[0],
        "num_attention_heads": _HEADS,
        "attention_head_dim": tensors["proj_in.weight"].shape[0] // _HEADS,
        "cross_attention_dim": tensors[f"{block}attn2.to_k.weight"].shape[1],
        "audio_in_channels": audio_channels,
        "audio_out_channels": tensors["audio_proj_out.weight"].shape[0],
        "audio_num_attention_heads": _HEADS,
        "audio_attention_head_dim": audio_dim // _HEADS,
        "audio_cross_attention_dim": tensors[f"{block}audio_attn2.to_k.weight"].shape[1],
        "num_layers": count(tensors, "transformer_blocks."),
        "gated_attn": f"{block}attn1.to_gate_logits.weight" in tensors,
        "audio_gated_attn": f"{block}audio_attn1.to_gate_logits.weight" in tensors,
        "cross_attn_mod": f"{block}prompt_scale_shift_table" in tensors,
        "audio_cross_attn_mod": f"{block}audio_prompt_scale_shift_table" in tensors,
        "use_prompt_embeddings": "caption_projection.linear_1.weight" in tensors,
        "rope_type": "split",
    }
    if config["use_prompt_embeddings"]:
        config["caption_channels"] = tensors["caption_projection.linear_1.weight"].shape[1]
    return config


LTX = GeneratorLayouts(
    name="LTX-Video",
    class_name="LTXVideoTransformer3DModel",
    marks={
        Naming.DIFFUSERS: ("proj_in.weight", "time_embed.linear.weight", "transformer_blocks.0.attn1.to_q.weight"),
        Naming.ORIGINAL: ("patchify_proj.weight", "adaln_single.linear.weight"),
    },
    original=(
        *modules({"patchify_proj": "proj_in", "proj_out": "proj_out"}),
        *_modulations({"adaln_single": "time_embed"}),
        *_captions("caption_projection"),
        *_same("scale_shift_table", f"{_BLOCK}scale_shift_table"),
        *_attention(),
        *_feed_forward("ff"),
    ),
    config=_config,
    version=lambda tensors: f"LTX-Video {'13B' if tensors['proj_in.weight'].shape[0] >= 4096 else '2B'}",
    original_prefix=_PREFIX,
    original_file="ltx-video.safetensors",
    left_out=_OTHER_PARTS,
)

LTX_2 = GeneratorLayouts(
    name="LTX-2",
    class_name="LTX2VideoTransformer3DModel",
    marks={
        Naming.DIFFUSERS: ("audio_proj_in.weight", "time_embed.linear.weight"),
        Naming.ORIGINAL: ("patchify_proj.weight", "audio_patchify_proj.weight"),
    },
    original=(
        *modules({"patchify_proj": "proj_in", "audio_patchify_proj": "audio_proj_in"}),
        *modules({"proj_out": "proj_out", "audio_proj_out": "audio_proj_out"}),
        *_modulations(
            {
                "adaln_single": "time_embed",
                "audio_adaln_single": "audio_time_embed",
                "prompt_adaln_single": "prompt_adaln",
                "audio_prompt_adaln_single": "audio_prompt_adaln",
                "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
                "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
                "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
                "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
            }
        ),
        *_captions("caption_projection", "audio_caption_projection"),
        *_same("scale_shift_table", "audio_scale_shift_table", "keyframes_abs_pos_embedding"),
        *_same(f"{_BLOCK}scale_shift_table", f"{_BLOCK}audio_scale_shift_table"),
        *_same(f"{_BLOCK}prompt_scale_shift_table", f"{_BLOCK}audio_prompt_scale_shift_table"),
        KeyRule(f"{_BLOCK}scale_shift_table_a2v_ca_video", f"{_BLOCK}video_a2v_cross_attn_scale_shift_table"),
        KeyRule(f"{_BLOCK}scale_shift_table_a2v_ca_audio", f"{_BLOCK}audio_a2v_cross_attn_scale_shift_table"),
        *_attention(),
        *_feed_forward("ff", "audio_ff"),
    ),
    config=_config_of_2,
    version=lambda tensors: "LTX-2.3" if "prompt_adaln.linear.weight" in tensors else "LTX-2",
    original_prefix=_PREFIX,
    original_file="ltx-2.safetensors",
    left_out=_OTHER_PARTS,
)
