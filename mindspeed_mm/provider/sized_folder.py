"""A model folder without weights, made of the sizes in model.json: what is trained from scratch where no folder is
named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.provider.generator_json import WAN_SIZES
from mindspeed_mm.provider.model_sizes import LANGUAGE_SIZES

Section = Mapping[str, Any]

_KINDS = {"qwen2vl": "qwen2_vl", "qwen2_vl": "qwen2_vl", "qwen2_5vl": "qwen2_5_vl", "qwen2_5_vl": "qwen2_5_vl"}
"""`model_id` → `model_type` of config.json."""
_CLASSES = {"qwen2_vl": "Qwen2VLForConditionalGeneration", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration"}
_DECODER_NEEDS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")
_TOWER_NEEDS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
_MARKS = {
    "img_context_token_id": "image_token_id",
    "video_token_id": "video_token_id",
    "vision_start_token_id": "vision_start_token_id",
}
_PATCHES = ("patch_size", "spatial_merge_size", "temporal_patch_size")
_WAN_NEEDS = ("num_layers", "num_heads", "hidden_size", "ffn_dim", "in_dim", "out_dim")
_WAN_PARTS = {
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
}
"""Those that the folder lacks encode media and captions; training on features needs none of them."""
_WAN_PARTS_OF_IMAGES = {
    "_class_name": "WanImageToVideoPipeline",
    "image_encoder": ["transformers", "CLIPVisionModel"],
    "image_processor": ["transformers", "CLIPImageProcessor"],
}
_WAN_OF_IMAGES = ("img_dim",)
"""Sizes that files copy for all tasks, and that only a model of image to video has."""


def files_of_sizes(model: Section, where: str) -> dict[str, JsonObject]:
    """Path in the folder → content, as transformers and diffusers have them.

    Args:
        model: The content of model.json.
        where: Its path, for messages.

    Raises:
        ConfigError: It describes no model whose sizes are enough to build it, or leaves sizes out.
    """
    if _mapping_of(model, "predictor").get("model_id") == "wandit":
        return _wan(model, where)
    kind = _KINDS.get(str(model.get("model_id")))
    if kind is None or not _mapping_of(model, "text_decoder"):
        raise ConfigError(
            "names no model folder, and sizes alone are enough for Qwen2-VL, Qwen2.5-VL and Wan",
            where=where,
            way_out="Name the folder: init_from_hf_path, or preprocess_parameters.model_name_or_path of data.json.",
        )
    return {"config.json": _vision_language(model, kind, where)}


def _vision_language(model: Section, kind: str, where: str) -> JsonObject:
    decoder = _mapping_of(model, "text_decoder")
    tower = _mapping_of(_mapping_of(model, "image_encoder"), "vision_encoder")
    _check(decoder, _DECODER_NEEDS, "text_decoder", where)
    _check(tower, _TOWER_NEEDS, "image_encoder.vision_encoder", where)
    config: JsonObject = {}
    for key, names in LANGUAGE_SIZES.items():
        if decoder.get(key) is not None:
            config[names[0]] = decoder[key]
    for theirs, ours in _MARKS.items():
        if model.get(theirs) is not None:
            config[ours] = model[theirs]
    if "max_position_embeddings" in decoder:
        config["max_position_embeddings"] = decoder["max_position_embeddings"]
    if "mrope_section" in decoder:
        config["rope_scaling"] = {"type": "mrope", "mrope_section": decoder["mrope_section"]}
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "tie_word_embeddings": not decoder.get("untie_embeddings_and_output_weights", False),
        **config,
        "vision_config": _tower(tower, decoder["hidden_size"], kind),
    }


def _tower(tower: Section, width: int, kind: str) -> JsonObject:
    """The vision tower, whose projector ends in the language model's width."""
    config = {"depth": tower["num_layers"], "num_heads": tower["num_attention_heads"]}
    for name in _PATCHES:
        if name in tower:
            config[name] = tower[name]
    if kind == "qwen2_vl":
        inner = {"embed_dim": tower["hidden_size"], "hidden_size": width}
        return config | inner | {"mlp_ratio": tower["ffn_hidden_size"] / tower["hidden_size"]}
    given = {"window_size": "window_attn_size", "fullatt_block_indexes": "fullatt_block_indexes"}
    for ours, theirs in given.items():
        if theirs in tower:
            config[ours] = tower[theirs]
    config |= {"hidden_size": tower["hidden_size"], "intermediate_size": tower["ffn_hidden_size"]}
    return config | {"out_hidden_size": width}


def _wan(model: Section, where: str) -> dict[str, JsonObject]:
    predictor = _mapping_of(model, "predictor")
    _check(predictor, _WAN_NEEDS, "predictor", where)
    takes_images = predictor.get("model_type", model.get("task")) == "i2v"
    width = predictor["hidden_size"]
    transformer: JsonObject = {"attention_head_dim": width // predictor["num_heads"]}
    for key, names in WAN_SIZES.items():
        is_used = takes_images or key not in _WAN_OF_IMAGES
        if key in predictor and key != "hidden_size" and is_used:
            transformer[names[0]] = predictor[key]
    for key in ("patch_size", "cross_attn_norm", "eps"):
        if key in predictor:
            transformer[key] = predictor[key]
    if takes_images:
        transformer["added_kv_proj_dim"] = width
    scheduler = "UniPCMultistepScheduler"
    noise = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    noise |= {"flow_shift": _mapping_of(model, "diffusion").get("shift", 1.0)}
    index = {"_class_name": "WanPipeline", **_WAN_PARTS, "scheduler": ["diffusers", scheduler]}
    if takes_images:
        index |= _WAN_PARTS_OF_IMAGES
    return {
        "model_index.json": index,
        "transformer/config.json": {"_class_name": "WanTransformer3DModel", **transformer},
        "scheduler/scheduler_config.json": {"_class_name": scheduler, **noise},
    }


def _mapping_of(content: Section, name: str) -> Section:
    found = content.get(name)
    if isinstance(found, Mapping):
        return found
    return {}


def _check(section: Section, needed: Sequence[str], name: str, where: str) -> None:
    missing = [key for key in needed if section.get(key) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: not given, and no model folder says it",
            where=where,
            key=name,
            way_out="Add the sizes, or name the model's folder.",
        )
