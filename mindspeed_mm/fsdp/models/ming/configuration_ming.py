"""The settings of Ming-Lite-Omni (arXiv:2506.09344), as its released config.json has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

MEDIA_SECTIONS = [16, 24, 24]
"""Frequencies of a head that turn by time, by height and by width (`rope_scaling.type: 3D`)."""
_OF_VISION = (
    *("depth", "hidden_size", "intermediate_size", "num_heads", "in_channels", "patch_size", "spatial_merge_size"),
    *("temporal_patch_size", "tokens_per_second", "window_size", "out_hidden_size", "fullatt_block_indexes"),
    *("hidden_act", "initializer_range"),
)
_NOT_BUILT = {"use_bias": False, "use_sliding_window": False, "first_k_dense_replace": 0, "hidden_act": "silu"}
"""Setting of the language model → the value that all released models have; no other one is built."""


class BailingMoeConfig(PreTrainedConfig):
    """The language model: Ling's mixture of experts, with a router for each kind of token.

    Args:
        vocab_size: Tokens.
        hidden_size: H.
        num_hidden_layers: Layers.
        num_attention_heads: Heads of the queries.
        num_key_value_heads: Heads of keys and values; 0: as many as of queries.
        head_dim: Features of a head; None: H by the number of heads.
        use_qkv_bias: Whether queries, keys and values have a bias.
        rms_norm_eps: Of the norms.
        rope_theta: Base of the frequencies.
        rope_scaling: `type: 3D` counts time, height and width of media; None: every token is one further.
        max_position_embeddings: Positions.
        moe_intermediate_size: Features inside an expert.
        num_experts: E.
        num_experts_per_tok: K.
        num_shared_experts: Experts, joined to one, that every token goes through.
        norm_topk_prob: Whether the weights of a token's experts add up to 1.
        multi_gate: Whether pictures and sounds have routers of their own.
        norm_head: Whether each column of the head is brought to length 1, over the vocabulary, before it is used.
        image_patch_token: Stands for a part of a picture or video.
        kwargs: What every configuration has.

    Raises:
        ValueError: The file asks for something that no released model has and that is not built.
    """

    model_type = "bailing_moe"
    base_config_key = "llm_config"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    ignore_keys_at_rope_validation: ClassVar[set[str]] = {"mrope_section"}

    def __init__(
        self,
        *,
        vocab_size: int = 126464,
        hidden_size: int = 2048,
        num_hidden_layers: int = 28,
        num_attention_heads: int = 16,
        num_key_value_heads: int = 4,
        head_dim: int | None = None,
        use_qkv_bias: bool = False,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 600000.0,
        rope_scaling: Mapping[str, Any] | None = None,
        max_position_embeddings: int = 32768,
        moe_intermediate_size: int = 1408,
        num_experts: int = 64,
        num_experts_per_tok: int = 6,
        num_shared_experts: int = 2,
        norm_topk_prob: bool = True,
        multi_gate: bool = False,
        norm_head: bool = False,
        image_patch_token: int = 126346,
        **kwargs: Any,
    ) -> None:
        for key, value in _NOT_BUILT.items():
            if kwargs.setdefault(key, value) != value:
                raise ValueError(f"llm_config.{key} is {kwargs[key]!r}; known is {value!r}")
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.qkv_bias = self.use_qkv_bias = use_qkv_bias
        self.rms_norm_eps, self.max_position_embeddings = rms_norm_eps, max_position_embeddings
        self.attention_dropout = kwargs.pop("attention_dropout", 0.0)
        self.initializer_range = kwargs.pop("initializer_range", 0.006)
        self.moe_intermediate_size, self.num_experts = moe_intermediate_size, num_experts
        self.num_experts_per_tok, self.num_shared_experts = num_experts_per_tok, num_shared_experts
        self.norm_topk_prob, self.multi_gate, self.norm_head = norm_topk_prob, multi_gate, norm_head
        self.image_patch_token = image_patch_token
        self.layer_types = ["full_attention"] * num_hidden_layers
        self.counts_media = rope_scaling is not None
        # All frequencies turn by the first of three positions, which counts tokens.
        sections = [self.head_dim // 2, 0, 0]
        if rope_scaling is not None:
            if rope_scaling.get("type") != "3D":
                raise ValueError(f"llm_config.rope_scaling.type is {rope_scaling.get('type')!r}; known is '3D'")
            sections = MEDIA_SECTIONS
            needed = 2 * sum(sections)
            if needed != self.head_dim:
                raise ValueError(f"llm_config.head_dim is {self.head_dim}; a rope_scaling of 3D needs {needed}")
        self.rope_theta = rope_theta
        self.rope_parameters = {"rope_type": "default", "rope_theta": rope_theta, "mrope_section": sections}
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)


class BailingAudioConfig(PreTrainedConfig):
    """The encoder of sounds, Whisper's of version 1.5 or SAN-M of the preview, and the step from it to the text.

    Args:
        whisper_encoder_config: `n_mels`, `n_ctx`, `n_state`, `n_head`, `n_layer`; None: the encoder is SAN-M.
        audio_encoder_config_sanm: As FunASR has it; read without the former.
        ds_kernel_size: Frames that a token sees of what the encoder makes.
        ds_stride: Frames from one token to the next.
        norm_query_embeds: Whether what stands for a sound is brought to length 1.
        kwargs: What every configuration has.

    Raises:
        ValueError: It describes no encoder.
    """

    model_type = "bailing_audio"
    base_config_key = "audio_config"

    def __init__(
        self,
        *,
        whisper_encoder_config: Mapping[str, Any] | None = None,
        audio_encoder_config_sanm: Mapping[str, Any] | None = None,
        ds_kernel_size: int | None = None,
        ds_stride: int | None = None,
        norm_query_embeds: bool = True,
        **kwargs: Any,
    ) -> None:
        self.whisper_encoder_config = dict(whisper_encoder_config) if whisper_encoder_config else None
        self.audio_encoder_config_sanm = dict(audio_encoder_config_sanm) if audio_encoder_config_sanm else None
        given, sanm = self.whisper_encoder_config, self.audio_encoder_config_sanm
        if given is not None:
            self.features, self.positions = given["n_mels"], given["n_ctx"]
            self.hidden_size, self.num_hidden_layers = given["n_state"], given["n_layer"]
            self.num_attention_heads, self.intermediate_size = given["n_head"], 4 * given["n_state"]
            self.hidden_act, self.layer_norm_eps, self.attention_dropout, self.hidden_dropout = "gelu", 1e-5, 0.0, 0.0
        elif sanm is not None:
            self.features, self.fsmn_kernel_size = sanm["input_size"], sanm["kernel_size"]
            self.hidden_size, self.num_hidden_layers = sanm["output_size"], sanm["num_blocks"]
            self.num_attention_heads, self.intermediate_size = sanm["attention_heads"], sanm["linear_units"]
            self.hidden_act, self.layer_norm_eps = "relu", 1e-12
            self.attention_dropout, self.hidden_dropout = sanm["attention_dropout_rate"], sanm["dropout_rate"]
            if sanm.get("sanm_shfit", 0) != 0:  # FunASR spells it so
                raise ValueError(f"audio_encoder_config_sanm.sanm_shfit is {sanm['sanm_shfit']}; known is 0")
        elif kwargs:  # with none at all, transformers makes one to compare others with
            raise ValueError("audio_config has neither whisper_encoder_config nor audio_encoder_config_sanm")
        size, stride = 1, 1
        if given is not None:
            size, stride = 3, 2  # the step to the text halves Whisper's frames
        self.ds_kernel_size, self.ds_stride = ds_kernel_size or size, ds_stride or stride
        self.norm_query_embeds = norm_query_embeds
        # What transformers' block of Whisper calls them.
        self.d_model = getattr(self, "hidden_size", 0)
        self.encoder_ffn_dim = getattr(self, "intermediate_size", 0)
        self.encoder_attention_heads = getattr(self, "num_attention_heads", 0)
        self.activation_function, self.activation_dropout, self.dropout = "gelu", 0.0, 0.0
        super().__init__(**kwargs)

    @property
    def hears_as_whisper(self) -> bool:
        """Whether the encoder is Whisper's."""
        return self.whisper_encoder_config is not None


class BailingMMConfig(PreTrainedConfig):
    """Qwen2.5-VL's tower, an encoder of sounds, and a language model whose routers differ by what a token stands for.

    Args:
        llm_config: The language model.
        vision_config: The tower.
        audio_config: The encoder of sounds; None: the model does not hear.
        mlp_depth: Linear layers from a tower to the text.
        kwargs: What every configuration has; `talker_config` is kept as it stands.
    """

    model_type = "bailingmm"
    projects_towers = True
    attribute_map: ClassVar[dict[str, str]] = {"text_config": "llm_config"}
    sub_configs: ClassVar[dict[str, Any]] = {
        "llm_config": BailingMoeConfig,
        "vision_config": Qwen2_5_VLVisionConfig,
        "audio_config": BailingAudioConfig,
    }

    def __init__(
        self,
        *,
        llm_config: Mapping[str, Any] | PreTrainedConfig | None = None,
        vision_config: Mapping[str, Any] | PreTrainedConfig | None = None,
        audio_config: Mapping[str, Any] | PreTrainedConfig | None = None,
        mlp_depth: int = 1,
        **kwargs: Any,
    ) -> None:
        language: Any = llm_config
        if not isinstance(language, PreTrainedConfig):
            language = BailingMoeConfig(**_without_type(language))
        vision: Any = vision_config
        if not isinstance(vision, PreTrainedConfig):
            known = {name: value for name, value in (vision or {}).items() if name in _OF_VISION}
            vision = Qwen2_5_VLVisionConfig(**known)
        hearing: Any = audio_config
        if isinstance(hearing, Mapping):
            hearing = BailingAudioConfig(**_without_type(hearing))
        self.llm_config, self.vision_config, self.audio_config = language, vision, hearing
        self.mlp_depth = mlp_depth
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)


def _without_type(given: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (given or {}).items() if key != "model_type"}
