"""FLUX.1 and FLUX.2.

Names: https://github.com/black-forest-labs/flux and flux2 (`model.py`), diffusers' `transformer_flux.py` and
`transformer_flux2.py`. MindSpeed-MM trains diffusers' own models.
"""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_mm.checkpoint.key_ops import ReorderParts
from mindspeed_mm.checkpoint.keymap import KeyRule
from mindspeed_mm.checkpoint.original.generator import GeneratorLayouts, Json, Naming, Tensors, count, fused, modules

_DOUBLE, _NEW_DOUBLE = "double_blocks.{n}.", "transformer_blocks.{n}."
_SINGLE, _NEW_SINGLE = "single_blocks.{n}.", "single_transformer_blocks.{n}."
_IMAGE_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_TEXT_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_MLP_RATIO = 4
"""Of FLUX.1's released models."""


def _scale(source: str, target: str) -> KeyRule:
    return KeyRule(f"{source}.scale", f"{target}.weight")


def _norms(at: str, becomes: str, added: str = "") -> list[KeyRule]:
    return [
        _scale(f"{at}norm.query_norm", f"{becomes}attn.norm_{added}q"),
        _scale(f"{at}norm.key_norm", f"{becomes}attn.norm_{added}k"),
    ]


def _double(feed_forward: Mapping[str, str]) -> list[KeyRule]:
    names = {"img_attn.proj": "attn.to_out.0", "txt_attn.proj": "attn.to_add_out", **feed_forward}
    return [
        *modules(names, _DOUBLE, _NEW_DOUBLE),
        fused(f"{_DOUBLE}img_attn.qkv", _IMAGE_QKV, at=_NEW_DOUBLE),
        fused(f"{_DOUBLE}txt_attn.qkv", _TEXT_QKV, at=_NEW_DOUBLE),
        *_norms(f"{_DOUBLE}img_attn.", _NEW_DOUBLE),
        *_norms(f"{_DOUBLE}txt_attn.", _NEW_DOUBLE, "added_"),
    ]


def _last_modulation() -> list[KeyRule]:
    """The authors' last modulation gives shift and scale, diffusers' scale and shift."""
    swap = (ReorderParts(0, (1, 0)),)
    return [
        *modules({"final_layer.linear": "proj_out"}),
        KeyRule("final_layer.adaLN_modulation.1.{part}", "norm_out.linear.{part}", swap),
    ]


def _embedder(name: str, at: str) -> dict[str, str]:
    return {f"{name}.in_layer": f"{at}.linear_1", f"{name}.out_layer": f"{at}.linear_2"}


_FEED_FORWARD = {
    "img_mod.lin": "norm1.linear",
    "txt_mod.lin": "norm1_context.linear",
    "img_mlp.0": "ff.net.0.proj",
    "img_mlp.2": "ff.net.2",
    "txt_mlp.0": "ff_context.net.0.proj",
    "txt_mlp.2": "ff_context.net.2",
}
_FEED_FORWARD_OF_2 = {
    "img_mlp.0": "ff.linear_in",
    "img_mlp.2": "ff.linear_out",
    "txt_mlp.0": "ff_context.linear_in",
    "txt_mlp.2": "ff_context.linear_out",
}
_MODULATIONS_OF_2 = ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
_INPUTS = {"img_in": "x_embedder", "txt_in": "context_embedder"}


def _common_config(tensors: Tensors) -> Json:
    dim, in_channels = tensors["x_embedder.weight"].shape
    out_channels = tensors["proj_out.weight"].shape[0]
    head_dim = tensors["transformer_blocks.0.attn.norm_q.weight"].shape[0]
    return {
        "in_channels": in_channels,
        "out_channels": None if out_channels == in_channels else out_channels,
        "num_layers": count(tensors, "transformer_blocks."),
        "num_single_layers": count(tensors, "single_transformer_blocks."),
        "attention_head_dim": head_dim,
        "num_attention_heads": dim // head_dim,
        "joint_attention_dim": tensors["context_embedder.weight"].shape[1],
    }


def _config(tensors: Tensors, given: Json) -> Json:
    return _common_config(tensors) | {
        "pooled_projection_dim": tensors["time_text_embed.text_embedder.linear_1.weight"].shape[1],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in tensors,
    }


def _config_of_2(tensors: Tensors, given: Json) -> Json:
    gate_and_up, dim = tensors["transformer_blocks.0.ff.linear_in.weight"].shape
    timestep = tensors["time_guidance_embed.timestep_embedder.linear_1.weight"]
    return _common_config(tensors) | {
        "timestep_guidance_channels": timestep.shape[1],
        "mlp_ratio": gate_and_up / 2 / dim,
        "guidance_embeds": "time_guidance_embed.guidance_embedder.linear_1.weight" in tensors,
    }


def _version(tensors: Tensors) -> str:
    has_guidance = "time_text_embed.guidance_embedder.linear_1.weight" in tensors
    if has_guidance:
        return "FLUX.1 dev"
    return "FLUX.1 schnell"


FLUX = GeneratorLayouts(
    name="FLUX.1",
    class_name="FluxTransformer2DModel",
    marks={
        Naming.DIFFUSERS: ("context_embedder.weight", "single_transformer_blocks.0.proj_mlp.weight"),
        Naming.ORIGINAL: ("txt_in.weight", "vector_in.in_layer.weight", "double_blocks.0.img_attn.qkv.weight"),
    },
    original=(
        *modules(_INPUTS),
        *modules(_embedder("time_in", "time_text_embed.timestep_embedder")),
        *modules(_embedder("vector_in", "time_text_embed.text_embedder")),
        *modules(_embedder("guidance_in", "time_text_embed.guidance_embedder")),
        *_double(_FEED_FORWARD),
        *modules({"modulation.lin": "norm.linear", "linear2": "proj_out"}, _SINGLE, _NEW_SINGLE),
        fused(
            f"{_SINGLE}linear1",
            [*(_NEW_SINGLE + name for name in _IMAGE_QKV), f"{_NEW_SINGLE}proj_mlp"],
            (1, 1, 1, _MLP_RATIO),
        ),
        *_norms(_SINGLE, _NEW_SINGLE),
        *_last_modulation(),
    ),
    config=_config,
    version=_version,
    original_file="flux1.safetensors",
)

FLUX_2 = GeneratorLayouts(
    name="FLUX.2",
    class_name="Flux2Transformer2DModel",
    marks={
        Naming.DIFFUSERS: ("context_embedder.weight", "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight"),
        Naming.ORIGINAL: ("txt_in.weight", "single_stream_modulation.lin.weight"),
    },
    original=(
        *modules(_INPUTS),
        *modules(_embedder("time_in", "time_guidance_embed.timestep_embedder")),
        *modules(_embedder("guidance_in", "time_guidance_embed.guidance_embedder")),
        *modules({f"{name}.lin": f"{name}.linear" for name in _MODULATIONS_OF_2}),
        *_double(_FEED_FORWARD_OF_2),
        *modules({"linear1": "attn.to_qkv_mlp_proj", "linear2": "attn.to_out"}, _SINGLE, _NEW_SINGLE),
        *_norms(_SINGLE, _NEW_SINGLE),
        *_last_modulation(),
    ),
    config=_config_of_2,
    original_file="flux2.safetensors",
    version=lambda tensors: "FLUX.2",
)
