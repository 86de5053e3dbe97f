"""The settings of DeepSeek-VL2 (arXiv:2412.10302), as its released config.json has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from mindspeed_mm.core.json_file import JsonObject

_TEXT_DEFAULTS: JsonObject = {
    "use_mla": True,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
}
"""What released files leave out, where transformers' classes have other defaults."""


_OWN_CLASS = "DeepseekVLV2ForCausalLM"
SAME_TYPE: dict[str, type[PreTrainedConfig]] = {}
"""Name in `architectures` → configuration of another family whose releases have the same model type."""


class DeepseekVLV2VisionConfig(PreTrainedConfig):
    """SigLIP (arXiv:2303.15343), without the pooling that its release keeps beside it.

    Args:
        width: Features of a patch.
        layers: Number of blocks.
        heads: Of the attention.
        mlp_ratio: Features between the two layers of a block's MLP, in widths.
        patch_size: Side of a patch, in pixels.
        image_size: Side of a tile, in pixels.
        num_channels: Of a pixel.
        kwargs: What every configuration has.
    """

    model_type = "deepseek_vl_v2_vision"
    base_config_key = "vision_config"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
    }
    hidden_act = "gelu_pytorch_tanh"
    layer_norm_eps = 1e-6
    attention_dropout = 0.0

    def __init__(
        self,
        *,
        width: int = 1152,
        layers: int = 27,
        heads: int = 16,
        mlp_ratio: float = 3.7362,
        patch_size: int = 14,
        image_size: int = 384,
        num_channels: int = 3,
        **kwargs: Any,
    ) -> None:
        self.width, self.layers, self.heads, self.mlp_ratio = width, layers, heads, mlp_ratio
        self.patch_size, self.image_size, self.num_channels = patch_size, image_size, num_channels
        super().__init__(**kwargs)

    @property
    def intermediate_size(self) -> int:
        """Features between the two layers of a block's MLP."""
        return int(self.width * self.mlp_ratio)

    @property
    def patches(self) -> int:
        """Patches along a side of a tile."""
        return self.image_size // self.patch_size


class DeepseekVLV2Config(PreTrainedConfig):
    """A SigLIP tower, a projector that joins neighbouring patches, and a DeepSeek language model with routed experts.

    Args:
        vision_config: The tower.
        projector_config: `input_dim`, `n_embed`, `depth`, `mlp_ratio`, `downsample_ratio`.
        language_config: Of a DeepSeek model. `use_mla: false` is plain multi-head attention; `topk_method: noaux_tc`
            is the router of DeepSeek-V3.
        candidate_resolutions: Sizes in pixels that pictures are cut into tiles of.
        tile_tag: How tiles are told from each other; 2D: a mark at the end of each row of patches.
        global_view_pos: Whether the whole picture stands in front of its tiles (`head`) or behind them (`tail`).
        kwargs: What every configuration has.

    Raises:
        ValueError: The file asks for something that no released model has and that is not built.
    """

    model_type = "deepseek_vl_v2"
    attribute_map: ClassVar[dict[str, str]] = {"text_config": "language_config"}
    sub_configs: ClassVar[JsonObject] = {"language_config": AutoConfig, "vision_config": DeepseekVLV2VisionConfig}

    def __init__(
        self,
        *,
        vision_config: Mapping[str, object] | PreTrainedConfig | None = None,
        projector_config: Mapping[str, object] | None = None,
        language_config: Mapping[str, object] | PreTrainedConfig | None = None,
        candidate_resolutions: list[list[int]] | None = None,
        tile_tag: str = "2D",
        global_view_pos: str = "head",
        **kwargs: Any,
    ) -> None:
        vision: Any = vision_config
        if not isinstance(vision, PreTrainedConfig):
            vision = DeepseekVLV2VisionConfig(**_without_type(vision))
        language: Any = language_config
        if not isinstance(language, PreTrainedConfig):
            language = build_language_config(language or {})
        self.vision_config, self.language_config = vision, language
        own = {"projector_type": "downsample_mlp_gelu", "depth": 2, "mlp_ratio": 1, "downsample_ratio": 2}
        own |= {"input_dim": vision.width, "n_embed": language.hidden_size}
        self.projector_config: JsonObject = own | dict(projector_config or {})
        self.candidate_resolutions = candidate_resolutions or [[384, 384]]
        self.tile_tag, self.global_view_pos = tile_tag, global_view_pos
        projector_type = self.projector_config["projector_type"]
        _check_known("projector_config.projector_type", projector_type, "downsample_mlp_gelu")
        _check_known("tile_tag", tile_tag, "2D")
        _check_known("global_view_pos", global_view_pos, "head", "tail")
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: JsonObject, **kwargs: object) -> Any:
        """As every configuration; that of the family which `architectures` names.

        Raises:
            ValueError: It names a family that is not known.
        """
        known = (_OWN_CLASS, *SAME_TYPE)
        for name in config_dict.get("architectures") or ():
            if name not in known:
                raise ValueError(f"architectures: {name} is not one of {', '.join(known)}")
            if name in SAME_TYPE:
                return SAME_TYPE[name].from_dict(_without_type(config_dict), **kwargs)
        return super().from_dict(config_dict, **kwargs)


def _check_known(key: str, value: object, *known: str) -> None:
    if value not in known:
        raise ValueError(f"{key} is {value!r}; known is {' or '.join(known)}")


def build_language_config(given: Mapping[str, object]) -> PreTrainedConfig:
    """The configuration of transformers' text model that computes what the released settings describe: DeepSeek-V2
    (arXiv:2405.04434), the same with plain attention, or with the router of DeepSeek-V3 (arXiv:2412.19437)."""
    values = _TEXT_DEFAULTS | _without_type(given)
    if values["topk_method"] == "noaux_tc":
        return CONFIG_MAPPING["deepseek_v3"](**values)
    if values["norm_topk_prob"]:
        raise ValueError("language_config.norm_topk_prob is True; it is known with topk_method noaux_tc only")
    if values["use_mla"]:
        return CONFIG_MAPPING["deepseek_v2"](**values)
    dense = values["first_k_dense_replace"]
    # Plain attention: transformers has this decoder as DeepSeek-OCR-2's.
    layers = ["dense"] * dense + ["sparse"] * (values["num_hidden_layers"] - dense)
    return CONFIG_MAPPING["deepseek_ocr2_text"](**values | {"mlp_layer_types": layers})


def _without_type(given: Mapping[str, object] | None) -> JsonObject:
    return {key: value for key, value in (given or {}).items() if key != "model_type"}
