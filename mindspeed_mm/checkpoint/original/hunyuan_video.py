"""HunyuanVideo and HunyuanVideo 1.5.

Names: https://github.com/Tencent-Hunyuan/HunyuanVideo (`hyvideo/modules/models.py`) and HunyuanVideo-1.5, diffusers'
`transformer_hunyuan_video.py` and `transformer_hunyuan_video15.py`, MindSpeed-MM's `HunyuanVideoConverter`.
"""

from __future__ import annotations

from mindspeed_mm.checkpoint.key_ops import ReorderParts
from mindspeed_mm.checkpoint.keymap import KeyRule
from mindspeed_mm.checkpoint.original.generator import GeneratorLayouts, Json, Naming, Tensors, count, fused, modules

_SWAPPED = (ReorderParts(0, (1, 0)),)
"""The authors' last modulation gives shift and scale, diffusers' scale and shift."""
_IMAGE_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_TEXT_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")

_REFINER = {
    "norm1": "norm1",
    "self_attn_proj": "attn.to_out.0",
    "norm2": "norm2",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaLN_modulation.1": "norm_out.linear",
}
_TEXT_IN = {
    "txt_in.t_embedder.mlp.0": "context_embedder.time_text_embed.timestep_embedder.linear_1",
    "txt_in.t_embedder.mlp.2": "context_embedder.time_text_embed.timestep_embedder.linear_2",
    "txt_in.c_embedder.linear_1": "context_embedder.time_text_embed.text_embedder.linear_1",
    "txt_in.c_embedder.linear_2": "context_embedder.time_text_embed.text_embedder.linear_2",
    "txt_in.input_embedder": "context_embedder.proj_in",
    "img_in.proj": "x_embedder.proj",
}
_TIME_AND_GUIDANCE = {
    "time_in.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "time_in.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "guidance_in.mlp.0": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.mlp.2": "time_text_embed.guidance_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
}
_DOUBLE = {
    "img_mod.linear": "norm1.linear",
    "img_attn_q_norm": "attn.norm_q",
    "img_attn_k_norm": "attn.norm_k",
    "img_attn_proj": "attn.to_out.0",
    "img_mlp.fc1": "ff.net.0.proj",
    "img_mlp.fc2": "ff.net.2",
    "txt_mod.linear": "norm1_context.linear",
    "txt_attn_q_norm": "attn.norm_added_q",
    "txt_attn_k_norm": "attn.norm_added_k",
    "txt_attn_proj": "attn.to_add_out",
    "txt_mlp.fc1": "ff_context.net.0.proj",
    "txt_mlp.fc2": "ff_context.net.2",
}
_SINGLE = {
    "modulation.linear": "norm.linear",
    "q_norm": "attn.norm_q",
    "k_norm": "attn.norm_k",
    "linear2": "proj_out",
}
_MM = {
    "txt_in.t_embedder.mlp": "txt_in.t_embedder.time_embed",
    "time_in.mlp": "time_in.time_embed",
    "guidance_in.mlp": "guidance_in.time_embed",
    "vector_in.in_layer": "vector_in.fc1",
    "vector_in.out_layer": "vector_in.fc2",
}
"""Where MindSpeed-MM's names differ from the authors', outside the blocks."""


def _refiner_rules() -> list[KeyRule]:
    old, new = "txt_in.individual_token_refiner.blocks.{n}.", "context_embedder.token_refiner.refiner_blocks.{n}."
    return [*modules(_REFINER, old, new), fused(f"{old}self_attn_qkv", _IMAGE_QKV, at=new)]


def _double_rules() -> list[KeyRule]:
    old, new = "double_blocks.{n}.", "transformer_blocks.{n}."
    return [
        *modules(_DOUBLE, old, new),
        fused(f"{old}img_attn_qkv", _IMAGE_QKV, at=new),
        fused(f"{old}txt_attn_qkv", _TEXT_QKV, at=new),
    ]


_OLD_SINGLE, _NEW_SINGLE = "single_blocks.{n}.", "single_transformer_blocks.{n}."
_SINGLE_QKV = [_NEW_SINGLE + name for name in _IMAGE_QKV]
_BLOCKS = (*_refiner_rules(), *_double_rules(), *modules(_SINGLE, _OLD_SINGLE, _NEW_SINGLE))


def _last_rules(linear: str, modulation: str) -> list[KeyRule]:
    return [*modules({linear: "proj_out"}), KeyRule(f"{modulation}.{{part}}", "norm_out.linear.{part}", _SWAPPED)]


def _mm_name(name: str) -> str:
    for old, new in _MM.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _config(tensors: Tensors, given: Json) -> Json:
    patches = tensors["x_embedder.proj.weight"].shape
    dim, head_dim = patches[0], tensors["transformer_blocks.0.attn.norm_q.weight"].shape[0]
    has_guidance = "time_text_embed.guidance_embedder.linear_1.weight" in tensors
    return {
        "in_channels": patches[1],
        "out_channels": tensors["proj_out.weight"].shape[0] // (patches[2] * patches[3] * patches[4]),
        "num_attention_heads": dim // head_dim,
        "attention_head_dim": head_dim,
        "num_layers": count(tensors, "transformer_blocks."),
        "num_single_layers": count(tensors, "single_transformer_blocks."),
        "num_refiner_layers": count(tensors, "context_embedder.token_refiner.refiner_blocks."),
        "mlp_ratio": tensors["transformer_blocks.0.ff.net.0.proj.weight"].shape[0] / dim,
        "patch_size": patches[3],
        "patch_size_t": patches[2],
        "guidance_embeds": has_guidance,
        "text_embed_dim": tensors["context_embedder.proj_in.weight"].shape[1],
        "pooled_projection_dim": tensors["time_text_embed.text_embedder.linear_1.weight"].shape[1],
        "image_condition_type": _condition(tensors, given.get("task")),
    }


def _condition(tensors: Tensors, task: str | None) -> str | None:
    """How a picture comes in: beside the latents with a mask (33 channels), or in place of the first frame. Keys and
    shapes of the second are those of the model that takes no picture."""
    if tensors["x_embedder.proj.weight"].shape[1] > 16:
        return "latent_concat"
    if task == "i2v":
        return "token_replace"
    return None


def _version(tensors: Tensors) -> str:
    if _condition(tensors, None):
        return "HunyuanVideo I2V"
    return "HunyuanVideo T2V, or I2V that replaces the first frame"


HUNYUAN_VIDEO = GeneratorLayouts(
    name="HunyuanVideo",
    class_name="HunyuanVideoTransformer3DModel",
    marks={
        Naming.DIFFUSERS: ("context_embedder.proj_in.weight", "single_transformer_blocks.0.proj_mlp.weight"),
        Naming.ORIGINAL: ("txt_in.input_embedder.weight", "single_blocks.0.linear1.weight"),
        Naming.MM: ("txt_in.input_embedder.weight", "single_blocks.0.linear1_qkv.weight"),
    },
    original=(
        *modules(_TEXT_IN | _TIME_AND_GUIDANCE),
        *_BLOCKS,
        fused(f"{_OLD_SINGLE}linear1", [*_SINGLE_QKV, f"{_NEW_SINGLE}proj_mlp"], (1, 1, 1, 4)),
        *_last_rules("final_layer.linear", "final_layer.adaLN_modulation.1"),
    ),
    mm=(
        *modules({_mm_name(old): new for old, new in (_TEXT_IN | _TIME_AND_GUIDANCE).items()}),
        *_BLOCKS,
        fused(f"{_OLD_SINGLE}linear1_qkv", _SINGLE_QKV),
        *modules({"linear1_mlp": "proj_mlp"}, _OLD_SINGLE, _NEW_SINGLE),
        *_last_rules("proj_out", "adaLN_modulation.1"),
    ),
    config=_config,
    version=_version,
    original_file="mp_rank_00_model_states.pt",
)

_OF_1_5 = {
    "time_in.mlp.0": "time_embed.timestep_embedder.linear_1",
    "time_in.mlp.2": "time_embed.timestep_embedder.linear_2",
    "time_r_in.mlp.0": "time_embed.timestep_embedder_r.linear_1",
    "time_r_in.mlp.2": "time_embed.timestep_embedder_r.linear_2",
    "byt5_in.layernorm": "context_embedder_2.norm",
    "byt5_in.fc1": "context_embedder_2.linear_1",
    "byt5_in.fc2": "context_embedder_2.linear_2",
    "byt5_in.fc3": "context_embedder_2.linear_3",
    "vision_in.proj.0": "image_embedder.norm_in",
    "vision_in.proj.1": "image_embedder.linear_1",
    "vision_in.proj.3": "image_embedder.linear_2",
    "vision_in.proj.4": "image_embedder.norm_out",
    "cond_type_embedding": "cond_type_embed",
}
_QKV_OF_1_5 = {
    "img_attn_q": "attn.to_q",
    "img_attn_k": "attn.to_k",
    "img_attn_v": "attn.to_v",
    "txt_attn_q": "attn.add_q_proj",
    "txt_attn_k": "attn.add_k_proj",
    "txt_attn_v": "attn.add_v_proj",
}


def _config_of_1_5(tensors: Tensors, given: Json) -> Json:
    patches = tensors["x_embedder.proj.weight"].shape
    dim, head_dim = patches[0], tensors["transformer_blocks.0.attn.norm_q.weight"].shape[0]
    return {
        "in_channels": patches[1],
        "out_channels": tensors["proj_out.weight"].shape[0] // (patches[2] * patches[3] * patches[4]),
        "num_attention_heads": dim // head_dim,
        "attention_head_dim": head_dim,
        "num_layers": count(tensors, "transformer_blocks."),
        "num_refiner_layers": count(tensors, "context_embedder.token_refiner.refiner_blocks."),
        "mlp_ratio": tensors["transformer_blocks.0.ff.net.0.proj.weight"].shape[0] / dim,
        "patch_size": patches[3],
        "patch_size_t": patches[2],
        "text_embed_dim": tensors["context_embedder.proj_in.weight"].shape[1],
        "text_embed_2_dim": tensors["context_embedder_2.linear_1.weight"].shape[1],
        "image_embed_dim": tensors["image_embedder.linear_1.weight"].shape[1],
        "use_meanflow": "time_embed.timestep_embedder_r.linear_1.weight" in tensors,
    }


HUNYUAN_VIDEO_1_5 = GeneratorLayouts(
    name="HunyuanVideo 1.5",
    class_name="HunyuanVideo15Transformer3DModel",
    marks={
        Naming.DIFFUSERS: ("context_embedder_2.linear_1.weight", "cond_type_embed.weight"),
        Naming.ORIGINAL: ("byt5_in.fc1.weight", "double_blocks.0.img_attn_q.weight"),
    },
    original=(
        *modules(_TEXT_IN | _OF_1_5),
        *_refiner_rules(),
        *modules(_DOUBLE | _QKV_OF_1_5, "double_blocks.{n}.", "transformer_blocks.{n}."),
        *_last_rules("final_layer.linear", "final_layer.adaLN_modulation.1"),
    ),
    config=_config_of_1_5,
    version=lambda tensors: "HunyuanVideo 1.5",
)
