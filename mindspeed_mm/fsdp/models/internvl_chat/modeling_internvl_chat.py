"""InternVL (arXiv:2412.05271) in its original folders, `InternVLChatModel`.

transformers has the model, and the folders ending in `-hf` or `-HF` are for it. The original ones name settings and
weights otherwise and hold the tower's queries, keys and values as one tensor. What is written here is how they are
named.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, InternVLConfig, InternVLForConditionalGeneration

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.models.internvl_chat.processing_internvl_chat import (
    InternVLChatProcessor,
    tokens_of_a_tile,
)
from mindspeed_mm.fsdp.utils.added_tokens import added_token_id
from mindspeed_mm.fsdp.utils.register import model_register

PICTURE = "<IMG_CONTEXT>"
"""The token that stands for a part of a picture. No setting has its number: the original code asks the tokenizer."""
_VISION = {"qkv_bias": "attention_bias", "qk_normalization": "use_qk_norm"}
"""Released name of a setting of the tower → name in transformers, where they differ."""


class InternVLChatConfig(InternVLConfig):
    """Released settings under the names of transformers' InternVL.

    Args:
        vision_config: Of the tower.
        llm_config: Of a language model that transformers has.
        select_layer: The tower's layer whose features are taken.
        ps_version: How patches are joined: `v2` is transformers'.
        use_thumbnail: Whether the whole picture is shown behind its tiles, which transformers' processor does.
        kwargs: What every configuration has.

    Raises:
        ValueError: The language model is none of transformers, or patches are joined or tiles are shown
            otherwise.
    """

    model_type = "internvl_chat"

    def __init__(
        self,
        *,
        vision_config: Any = None,
        llm_config: Mapping[str, object] | None = None,
        select_layer: int = -1,
        ps_version: str = "v2",
        use_thumbnail: bool = True,
        **kwargs: Any,
    ) -> None:
        for key, value, known in (("ps_version", ps_version, "v2"), ("use_thumbnail", use_thumbnail, True)):
            if value != known:
                raise ValueError(f"{key} is {value!r}; known is {known!r}")
        if isinstance(vision_config, Mapping) and vision_config.get("model_type") != "internvl_vision":
            vision_config = {_VISION.get(name, name): value for name, value in vision_config.items()}
            vision_config["model_type"] = "internvl_vision"
            kwargs.setdefault("image_seq_length", tokens_of_a_tile(vision_config, kwargs.get("downsample_ratio", 0.5)))
        if llm_config is not None:
            kind = llm_config.get("model_type")
            if kind not in CONFIG_MAPPING:
                raise ValueError(f"llm_config.model_type is {kind!r}, which transformers has no language model for")
            kwargs.setdefault("text_config", dict(llm_config))
            kwargs.setdefault("tie_word_embeddings", llm_config.get("tie_word_embeddings", False))
        super().__init__(vision_config=vision_config, vision_feature_layer=select_layer, **kwargs)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: object, **kwargs: object) -> object:
        """As of every configuration, with the number of a picture's token, which is that of the tokenizer beside it."""
        config_dict, unused = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return _with_token(config_dict, pretrained_model_name_or_path), unused

    @classmethod
    def from_dict(cls, config_dict: JsonObject, **kwargs: object) -> Any:
        """As every configuration; transformers' AutoConfig says where the file lay, and asks nothing else of a class.

        Raises:
            ModelFolderError: The tokenizer does not have the token of pictures.
        """
        return super().from_dict(_with_token(config_dict, kwargs.get("name_or_path")), **kwargs)


def _with_token(config_dict: JsonObject, folder: Any) -> JsonObject:
    if not folder or "image_token_id" in config_dict:
        return config_dict
    return config_dict | {"image_token_id": added_token_id(Path(folder), PICTURE)}


@model_register.register("internvl_chat")
class InternVLChatModel(InternVLForConditionalGeneration):
    """transformers' class, by the name that original folders give."""

    config: InternVLChatConfig
    config_class = InternVLChatConfig


def tell_transformers() -> None:
    """Let transformers' Auto classes find the model, its processor, and how its released weights are named."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

    AutoConfig.register(InternVLChatConfig.model_type, InternVLChatConfig, exist_ok=True)
    AutoModelForImageTextToText.register(InternVLChatConfig, InternVLChatModel, exist_ok=True)
    AutoProcessor.register(InternVLChatConfig, InternVLChatProcessor, exist_ok=True)
    rules: list[object] = [WeightRenaming(f"^{released}", own) for released, own in _NAMES.items()]
    for kind in ("weight", "bias"):
        parts = [f"attention.{name}_proj.{kind}" for name in "qkv"]
        rules.append(WeightConverter(f"attention.qkv.{kind}", parts, operations=[Chunk(dim=0)]))
    register_checkpoint_conversion_mapping(InternVLChatConfig.model_type, rules, overwrite=True)


_PLACES, _OWN_PLACES = r"vision_model\.embeddings\.", "model.vision_tower.embeddings."
_BLOCK, _OWN_BLOCK = r"vision_model\.encoder\.layers\.(\d+)\.", r"model.vision_tower.encoder.layer.\1."
_NAMES = {
    r"language_model\.model\.": "model.language_model.model.",  # transformers' rule of the class inside leaves one out
    r"language_model\.lm_head\.": "lm_head.",
    rf"{_PLACES}class_embedding": f"{_OWN_PLACES}cls_token",
    rf"{_PLACES}position_embedding": f"{_OWN_PLACES}position_embeddings",
    rf"{_PLACES}patch_embedding\.": f"{_OWN_PLACES}patch_embeddings.projection.",
    rf"{_BLOCK}ls1": f"{_OWN_BLOCK}lambda_1",
    rf"{_BLOCK}ls2": f"{_OWN_BLOCK}lambda_2",
    rf"{_BLOCK}norm1\.": f"{_OWN_BLOCK}layernorm_before.",
    rf"{_BLOCK}norm2\.": f"{_OWN_BLOCK}layernorm_after.",
    rf"{_BLOCK}mlp\.": f"{_OWN_BLOCK}mlp.",
    rf"{_BLOCK}attn\.proj\.": f"{_OWN_BLOCK}attention.projection_layer.",
    rf"{_BLOCK}attn\.q_norm\.": f"{_OWN_BLOCK}attention.q_norm.",
    rf"{_BLOCK}attn\.k_norm\.": f"{_OWN_BLOCK}attention.k_norm.",
    rf"{_BLOCK}attn\.qkv\.": f"{_OWN_BLOCK}attention.qkv.",
    r"mlp1\.0\.": "model.multi_modal_projector.layer_norm.",
    r"mlp1\.1\.": "model.multi_modal_projector.linear_1.",
    r"mlp1\.3\.": "model.multi_modal_projector.linear_2.",
}
"""Released name → name in transformers' class."""
