"""Wan 2.1 and 2.2, and VACE, its variant with a control branch.

Names: https://github.com/Wan-Video/Wan2.1 (`wan/modules/model.py`, `vace_model.py`), diffusers' `transformer_wan.py`,
MindSpeed-MM's `wan_dit.py` and `vace_model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_mm.checkpoint.keymap import KeyRule
from mindspeed_mm.checkpoint.original.generator import GeneratorLayouts, Json, Naming, Tensors, count, modules
from mindspeed_mm.core.errors import ModelFolderError

_HEAD_DIM = 128
"""Of every released size."""

_IN_BLOCK = {
    "self_attn.q": "attn1.to_q",
    "self_attn.k": "attn1.to_k",
    "self_attn.v": "attn1.to_v",
    "self_attn.o": "attn1.to_out.0",
    "self_attn.norm_q": "attn1.norm_q",
    "self_attn.norm_k": "attn1.norm_k",
    "cross_attn.q": "attn2.to_q",
    "cross_attn.k": "attn2.to_k",
    "cross_attn.v": "attn2.to_v",
    "cross_attn.o": "attn2.to_out.0",
    "cross_attn.norm_q": "attn2.norm_q",
    "cross_attn.norm_k": "attn2.norm_k",
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}
_OUTSIDE = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "head.head": "proj_out",
}
_VACE_PROJECTIONS = {"before_proj": "proj_in", "after_proj": "proj_out"}

_MM_IN_BLOCK = {
    "self_attn.q": "self_attn.proj_q",
    "self_attn.k": "self_attn.proj_k",
    "self_attn.v": "self_attn.proj_v",
    "self_attn.o": "self_attn.proj_out",
    "self_attn.norm_q": "self_attn.q_norm",
    "self_attn.norm_k": "self_attn.k_norm",
    "cross_attn.q": "cross_attn.proj_q",
    "cross_attn.k": "cross_attn.proj_k",
    "cross_attn.v": "cross_attn.proj_v",
    "cross_attn.o": "cross_attn.proj_out",
    "cross_attn.norm_q": "cross_attn.q_norm",
    "cross_attn.norm_k": "cross_attn.k_norm",
    "cross_attn.norm_k_img": "cross_attn.k_norm_img",
}
"""Where MindSpeed-MM's names differ from the authors'."""
_MM_OUTSIDE = {"text_embedding.0": "text_embedding.linear_1", "text_embedding.2": "text_embedding.linear_2"}


def _block(at: str, becomes: str, names: Mapping[str, str]) -> list[KeyRule]:
    return [*modules(names, at, becomes), KeyRule(f"{at}modulation", f"{becomes}scale_shift_table")]


def _base(outside: Mapping[str, str], in_block: Mapping[str, str], at: str = "") -> list[KeyRule]:
    return [
        *modules(outside, at, ""),
        KeyRule(f"{at}img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"),
        KeyRule(f"{at}head.modulation", "scale_shift_table"),
        *_block(f"{at}blocks.{{n}}.", "blocks.{n}.", in_block),
    ]


def _renamed(names: Mapping[str, str], renames: Mapping[str, str]) -> dict[str, str]:
    return {renames.get(old, old): new for old, new in names.items()}


_MM_BASE = (_renamed(_OUTSIDE, _MM_OUTSIDE), _renamed(_IN_BLOCK, _MM_IN_BLOCK))
_VACE_PATCHES = {"vace_patch_embedding": "vace_patch_embedding"}


def _config(tensors: Tensors, given: Json) -> Json:
    out_rows, dim = tensors["proj_out.weight"].shape
    patches = tensors["patch_embedding.weight"].shape
    heads = int(given["num_heads"]) if "num_heads" in given else _released_heads(dim)
    config: Json = {
        "patch_size": list(patches[2:]),
        "num_attention_heads": heads,
        "attention_head_dim": dim // heads,
        "in_channels": patches[1],
        "out_channels": out_rows // (patches[2] * patches[3] * patches[4]),
        "text_dim": tensors["condition_embedder.text_embedder.linear_1.weight"].shape[1],
        "freq_dim": tensors["condition_embedder.time_embedder.linear_1.weight"].shape[1],
        "ffn_dim": tensors["blocks.0.ffn.net.0.proj.weight"].shape[0],
        "num_layers": count(tensors, "blocks."),
        "cross_attn_norm": "blocks.0.norm2.weight" in tensors,
        "eps": float(given.get("eps", 1e-6)),
    }
    image = tensors.get("condition_embedder.image_embedder.norm1.weight")
    if image is not None:
        config |= {"image_dim": image.shape[0], "added_kv_proj_dim": dim}
    positions = tensors.get("condition_embedder.image_embedder.pos_embed")
    if positions is not None:
        config["pos_embed_seq_len"] = positions.shape[1]
    return config


def _released_heads(dim: int) -> int:
    """Shapes do not tell the heads; every released size has them alike."""
    if dim % _HEAD_DIM:
        raise ModelFolderError(
            f"the weights are {dim} wide, which is not a released size, and do not tell how many heads they have",
            way_out="Name a diffusers folder of the same model, whose config.json tells it: cfg.hf_dir or --model.",
        )
    return dim // _HEAD_DIM


def _vace_config(tensors: Tensors, given: Json) -> Json:
    config, branches = _config(tensors, given), count(tensors, "vace_blocks.")
    evenly = [i * (config["num_layers"] // branches) for i in range(branches)]  # as both released sizes have them
    return config | {
        "vace_layers": list(given.get("vace_layers", evenly)),
        "vace_in_channels": tensors["vace_patch_embedding.weight"].shape[1],
    }


def _original_config(tensors: Tensors, config: Json) -> Json:
    dim = config["num_attention_heads"] * config["attention_head_dim"]
    is_vace = "vace_layers" in config
    if is_vace:
        class_name, model_type = "VaceWanModel", "vace"
    else:
        class_name, model_type = "WanModel", _task(tensors).lower()
    original = {
        "_class_name": class_name,
        "model_type": model_type,
        "dim": dim,
        "eps": config["eps"],
        "ffn_dim": config["ffn_dim"],
        "freq_dim": config["freq_dim"],
        "in_dim": config["in_channels"],
        "num_heads": config["num_attention_heads"],
        "num_layers": config["num_layers"],
        "out_dim": config["out_channels"],
        "text_len": 512,
    }
    if is_vace:
        original |= {"vace_in_dim": config["vace_in_channels"], "vace_layers": list(config["vace_layers"])}
    return original


def _task(tensors: Tensors) -> str:
    if "condition_embedder.image_embedder.pos_embed" in tensors:
        return "FLF2V"
    channels = tensors["patch_embedding.weight"].shape[1]
    has_image = "condition_embedder.image_embedder.norm1.weight" in tensors
    if not has_image:
        return {16: "T2V", 48: "TI2V"}.get(channels, "I2V")
    return "I2V"


def _version(tensors: Tensors) -> str:
    if "vace_patch_embedding.weight" in tensors:
        return "VACE"
    task = _task(tensors)
    if task == "T2V":
        return "Wan 2.1 or 2.2 T2V"  # the same keys and shapes
    is_2_1 = "condition_embedder.image_embedder.norm1.weight" in tensors
    return f"Wan {'2.1' if is_2_1 else '2.2'} {task}"


WAN = GeneratorLayouts(
    name="Wan",
    class_name="WanTransformer3DModel",
    marks={
        Naming.DIFFUSERS: ("condition_embedder.time_proj.weight", "blocks.0.attn1.to_q.weight"),
        Naming.ORIGINAL: ("head.modulation", "blocks.0.self_attn.q.weight"),
        Naming.MM: ("time_projection.1.weight", "blocks.0.self_attn.proj_q.weight"),
    },
    original=tuple(_base(_OUTSIDE, _IN_BLOCK)),
    mm=tuple(_base(*_MM_BASE)),
    config=_config,
    original_config=_original_config,
    version=_version,
)

VACE = GeneratorLayouts(
    name="VACE",
    class_name="WanVACETransformer3DModel",
    marks={
        Naming.DIFFUSERS: ("vace_patch_embedding.weight", "blocks.0.attn1.to_q.weight"),
        Naming.ORIGINAL: ("vace_patch_embedding.weight", "vace_blocks.0.self_attn.q.weight"),
        Naming.MM: ("wan_dit.time_projection.1.weight", "wan_dit.blocks.0.self_attn.proj_q.weight"),
    },
    original=(
        *_base(_OUTSIDE, _IN_BLOCK),
        *modules(_VACE_PATCHES),
        *_block("vace_blocks.{n}.", "vace_blocks.{n}.", _IN_BLOCK | _VACE_PROJECTIONS),
    ),
    mm=(
        *_base(*_MM_BASE, at="wan_dit."),
        *modules(_VACE_PATCHES, "vace_dit.", ""),
        *modules(_VACE_PROJECTIONS, "vace_dit.vace_blocks.{n}.", "vace_blocks.{n}."),
        *_block("vace_dit.vace_blocks.{n}.wan_dit_block.", "vace_blocks.{n}.", _MM_BASE[1]),
    ),
    config=_vace_config,
    original_config=_original_config,
    version=_version,
)
