"""The settings of MiMo-V2.5, as its released config.json has them: those of the text model stand beside the sections of
the towers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import MiMoV2FlashConfig, PreTrainedConfig, Qwen2Config

from mindspeed_mm.core.json_file import JsonMapping, JsonObject

_TEXT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act"),
    *("num_key_value_heads", "max_position_embeddings", "initializer_range", "attention_bias", "attention_dropout"),
    *("moe_intermediate_size", "num_experts_per_tok", "n_routed_experts", "routed_scaling_factor", "n_group"),
    *("topk_group", "norm_topk_prob", "head_dim", "v_head_dim", "sliding_window", "attention_value_scale", "use_cache"),
    *("eos_token_id", "pad_token_id"),
)
"""Settings that the text model's class calls by the released name."""
_AS_BUILT: JsonObject = {
    "attention_projection_layout": "fused_qkv",
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_shared_experts": None,
    "tie_word_embeddings": False,
}
"""Setting of the text model → its only value that is built, which is the released one."""


class MiMoV2VisionConfig(PreTrainedConfig):
    """The vision tower.

    Args:
        depth: Blocks.
        hidden_size: Features of a patch.
        intermediate_size: Between the layers of a block's MLP.
        num_heads: Of queries.
        num_key_value_heads: Of keys and values.
        qk_channels: Width of a head.
        out_hidden_size: Features of a token of the text model.
        patch_size: Side of a patch, in pixels.
        temporal_patch_size: Frames of a patch.
        spatial_merge_size: Sides, in patches, of the square that becomes one token.
        in_chans: Of a pixel.
        fullatt_block_indexes: Blocks whose patches see all of their frame.
        vit_window_attn_types: Of each block, 1 where patches stand column by column; otherwise row by row.
        visual_token_window_size: How many patches one sees on either side, where it does not see all.
        use_sink: Whether the first patch of a frame has a learned part in what windows see.
        hidden_act: Of the MLP.
        rms_norm_eps: Of the norms of blocks.
        kwargs: What every configuration has.

    Raises:
        ValueError: There is not one kind of window for each block.
    """

    model_type = "mimo_v2_vision"
    base_config_key = "vision_config"
    attribute_map: ClassVar[dict[str, str]] = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads"}

    def __init__(
        self,
        *,
        depth: int = 28,
        hidden_size: int = 1280,
        intermediate_size: int = 4608,
        num_heads: int = 32,
        num_key_value_heads: int = 8,
        qk_channels: int = 64,
        out_hidden_size: int = 4096,
        patch_size: int = 16,
        temporal_patch_size: int = 2,
        spatial_merge_size: int = 2,
        in_chans: int = 3,
        fullatt_block_indexes: list[int] | None = None,
        vit_window_attn_types: list[int] | None = None,
        visual_token_window_size: int = -1,
        use_sink: bool = False,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        self.depth, self.hidden_size, self.intermediate_size = depth, hidden_size, intermediate_size
        self.num_heads, self.num_key_value_heads, self.qk_channels = num_heads, num_key_value_heads, qk_channels
        self.out_hidden_size, self.patch_size, self.temporal_patch_size = (
            out_hidden_size,
            patch_size,
            temporal_patch_size,
        )
        self.spatial_merge_size, self.in_chans = spatial_merge_size, in_chans
        self.fullatt_block_indexes = list(fullatt_block_indexes or [])
        self.vit_window_attn_types = list(vit_window_attn_types or [-1] * depth)
        self.visual_token_window_size, self.use_sink = visual_token_window_size, use_sink
        self.hidden_act, self.rms_norm_eps = hidden_act, rms_norm_eps
        if len(self.vit_window_attn_types) != depth:
            raise ValueError(f"vision_config.vit_window_attn_types has {len(self.vit_window_attn_types)} of {depth}")
        super().__init__(**kwargs)

    @property
    def in_channels(self) -> int:
        """Of a pixel, as towers of this kind call it."""
        return self.in_chans

    @property
    def head_dim(self) -> int:
        """Width of a head, as attention asks for it."""
        return self.qk_channels


class MiMoV2AudioConfig(PreTrainedConfig):
    """The encoder of codes of sound.

    Args:
        audio_channels: Codebooks.
        group_size: Frames of codes that become one token of the text model.
        input_local_dim: Features of a frame.
        input_local_layers: Of the transformer over the frames of a group.
        input_local_attn_heads: Of its attention.
        input_local_intermediate_size: Between the layers of its MLPs.
        out_hidden_size: Features of a token of the text model.
        rope_theta: Of its rotary places.
        speech_vocab_size: Rows of each codebook's table, one number or one for each with `-` between them.
        speech_zeroemb_idx: Of each table the row of no code, likewise.
        kwargs: What every configuration has.

    Raises:
        ValueError: The file asks for what no released model has.
    """

    model_type = "mimo_v2_audio"
    base_config_key = "audio_config"

    def __init__(
        self,
        *,
        audio_channels: int = 20,
        group_size: int = 4,
        input_local_dim: int = 1024,
        input_local_layers: int = 6,
        input_local_attn_heads: int = 16,
        input_local_intermediate_size: int = 4096,
        out_hidden_size: int = 4096,
        rope_theta: float = 640000.0,
        speech_vocab_size: str | int = "1280",
        speech_zeroemb_idx: str | int = "1024",
        **kwargs: Any,
    ) -> None:
        self.audio_channels, self.group_size, self.out_hidden_size = audio_channels, group_size, out_hidden_size
        self.input_local_dim, self.input_local_layers = input_local_dim, input_local_layers
        self.input_local_attn_heads = input_local_attn_heads
        self.input_local_intermediate_size, self.rope_theta = input_local_intermediate_size, rope_theta
        self.speech_vocab_size, self.speech_zeroemb_idx = speech_vocab_size, speech_zeroemb_idx
        built = {"input_full_attention": True, "add_post_norm": True, "projection_layers": 2}
        _check_built("audio_config.", kwargs, built | {"partial_rotary_factor": 1.0})
        super().__init__(**kwargs)

    def of_codebooks(self, name: str) -> list[int]:
        """One number for each codebook out of `speech_vocab_size` or `speech_zeroemb_idx`."""
        numbers = [int(number) for number in str(getattr(self, name)).split("-")]
        if len(numbers) == 1:
            return numbers * self.audio_channels
        return numbers[: self.audio_channels]

    @property
    def local(self) -> Qwen2Config:
        """Of the transformer over the frames of a group."""
        return Qwen2Config(
            hidden_size=self.input_local_dim,
            num_hidden_layers=self.input_local_layers,
            num_attention_heads=self.input_local_attn_heads,
            num_key_value_heads=self.input_local_attn_heads,
            intermediate_size=self.input_local_intermediate_size,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            vocab_size=1,
            attn_implementation="sdpa",  # a few frames at a time, all of which see each other
        )


class MiMoV2Config(PreTrainedConfig):
    """The whole model. Settings of the text model are given by their released names, or as `text_config`.

    Args:
        text_config: Of a MiMo-V2-Flash model, in the stead of the released names.
        vision_config: The vision tower.
        audio_config: The encoder of sound.
        processor_config: What the released processor is told, with the numbers of its tokens.
        image_token_id: The token that stands for a part of a picture.
        video_token_id: The same of a video.
        kwargs: The text model's settings, and what every configuration has.

    Raises:
        ValueError: The file asks for what is not built, or it is a text model alone.
    """

    model_type = "mimo_v2"
    sub_configs: ClassVar[JsonObject] = {
        "text_config": MiMoV2FlashConfig,
        "vision_config": MiMoV2VisionConfig,
        "audio_config": MiMoV2AudioConfig,
    }

    def __init__(
        self,
        *,
        text_config: Any = None,
        vision_config: Any = None,
        audio_config: Any = None,
        processor_config: JsonMapping | None = None,
        image_token_id: int = 151655,
        video_token_id: int = 151656,
        **kwargs: Any,
    ) -> None:
        if text_config is None:
            if kwargs.get("num_hidden_layers") and not (vision_config and audio_config):
                raise ValueError("'mimo_v2' without vision_config and audio_config (MiMo-V2.5-Pro) is not built")
            _check_built("", kwargs, _AS_BUILT)
            text_config = _text_settings(kwargs)
        elif not isinstance(text_config, Mapping):
            text_config = text_config.to_dict()
        self.text_config = MiMoV2FlashConfig(**{key: text_config[key] for key in text_config if key != "model_type"})
        self.vision_config = _section(MiMoV2VisionConfig, vision_config)
        self.audio_config = _section(MiMoV2AudioConfig, audio_config)
        self.processor_config = dict(processor_config or {})
        self.image_token_id, self.video_token_id = image_token_id, video_token_id
        self.audio_token_id = int(self.processor_config.get("audio_token_id", 151669))
        own = {"tie_word_embeddings": False, "eos_token_id": self.text_config.eos_token_id}
        own |= {"pad_token_id": self.text_config.pad_token_id}
        super().__init__(**own | {name: kwargs[name] for name in ("architectures", "dtype") if name in kwargs})

    @property
    def initializer_range(self) -> float:
        """Deviation of new weights in all parts of the model."""
        return float(self.text_config.initializer_range)


def _text_settings(released: JsonMapping) -> JsonObject:
    """Of MiMo-V2-Flash's class. `sliding_window` counts the token itself, as the released code reads it."""
    settings = {name: released[name] for name in _TEXT if name in released}
    if not settings:
        return settings
    kinds, routed = released["hybrid_layer_pattern"], released["moe_layer_freq"]
    if released.get("swa_num_key_value_heads") != 2 * settings["num_key_value_heads"]:
        raise ValueError("swa_num_key_value_heads is not twice num_key_value_heads, as it is in the released model")
    for name in ("head_dim", "v_head_dim", "num_attention_heads"):
        if released.get(f"swa_{name}", settings[name]) != settings[name]:
            raise ValueError(f"swa_{name} is not {name}, as it is in the released model")
    part = {"rope_type": "default", "partial_rotary_factor": released.get("partial_rotary_factor", 1.0)}
    return settings | {
        "rms_norm_eps": released.get("layernorm_epsilon", 1e-6),
        "layer_types": ["sliding_attention" if kind else "full_attention" for kind in kinds],
        "mlp_layer_types": ["sparse" if kind else "dense" for kind in routed],
        "rope_parameters": {
            "full_attention": part | {"rope_theta": float(released["rope_theta"])},
            "sliding_attention": part | {"rope_theta": float(released["swa_rope_theta"])},
        },
    }


def _section(kind: type[PreTrainedConfig], given: Any) -> Any:
    if isinstance(given, PreTrainedConfig):
        return given
    return kind(**{key: value for key, value in (given or {}).items() if key != "model_type"})


def _check_built(section: str, given: Mapping[str, object], built: Mapping[str, object]) -> None:
    for name, value in built.items():
        if given.get(name, value) != value:
            raise ValueError(f"{section}{name} is {given[name]!r}; known is {value!r} only")
