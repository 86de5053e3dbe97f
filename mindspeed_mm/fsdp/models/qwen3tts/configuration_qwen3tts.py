"""The settings of Qwen3-TTS (arXiv:2601.15621), as its released config.json has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedConfig, Qwen3Config

from mindspeed_mm.core.json_file import JsonObject

_BLOCKS: JsonObject = {
    "vocab_size": 3072, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 20,
    "num_attention_heads": 16, "num_key_value_heads": 2, "rope_theta": 10000.0,
}  # fmt: skip
_TALKER: JsonObject = _BLOCKS | {
    "text_vocab_size": 151936, "text_hidden_size": 2048, "num_code_groups": 32,
    "codec_eos_token_id": 4198, "codec_think_id": 4202, "codec_nothink_id": 4203, "codec_think_bos_id": 4204,
    "codec_think_eos_id": 4205, "codec_pad_id": 4196, "codec_bos_id": 4197,
}  # fmt: skip
_PREDICTOR: JsonObject = _BLOCKS | {
    "vocab_size": 2048, "intermediate_size": 3072, "num_hidden_layers": 5, "num_key_value_heads": 8, "head_dim": 128,
    "num_code_groups": 32,
}  # fmt: skip
_SPEAKER: JsonObject = {
    "mel_dim": 128, "enc_dim": 1024, "enc_channels": [512, 512, 512, 512, 1536], "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1], "enc_attention_channels": 128, "enc_res2net_scale": 8, "enc_se_channels": 128,
    "sample_rate": 24000,
}  # fmt: skip
"""What released files leave out, here and above, is as in the published classes."""


class Qwen3TTSSpeakerConfig(PreTrainedConfig):
    """An ECAPA-TDNN (arXiv:2005.07143) that hears who speaks.

    Args:
        kwargs: Settings; those left out are the published ones.
    """

    model_type = "qwen3_tts_speaker_encoder"
    base_config_key = "speaker_encoder_config"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**_SPEAKER | _without_type(kwargs))


class Qwen3TTSConfig(PreTrainedConfig):
    """A talker, which is a Qwen3 over text and the first codebook, with a code predictor for the other codebooks.

    Args:
        talker_config: Of the talker; within it `code_predictor_config`.
        speaker_encoder_config: Of the speaker encoder.
        tts_model_type: `base` has a speaker encoder; other models know voices by name (`talker_config.spk_id`).
        tts_pad_token_id: Text token where the text has ended.
        tts_bos_token_id: In front of the text.
        tts_eos_token_id: Behind it.
        kwargs: What every configuration has.

    Raises:
        ValueError: Positions are to be scaled, or the codebooks of talker and predictor differ in number.
    """

    model_type = "qwen3_tts"
    sub_configs: ClassVar[JsonObject] = {"talker_config": Qwen3Config}

    def __init__(
        self,
        talker_config: Mapping[str, object] | PreTrainedConfig | None = None,
        speaker_encoder_config: Mapping[str, object] | PreTrainedConfig | None = None,
        tts_model_type: str = "base",
        tts_pad_token_id: int = 151671,
        tts_bos_token_id: int = 151672,
        tts_eos_token_id: int = 151673,
        **kwargs: Any,
    ) -> None:
        talker = _as_mapping(talker_config)
        predictor = _block_settings(_PREDICTOR | _as_mapping(talker.pop("code_predictor_config", None)))
        self.talker_config: Any = _block_settings(_TALKER | talker)
        self.talker_config.code_predictor_config = predictor
        if predictor.num_code_groups != self.talker_config.num_code_groups:
            raise ValueError(
                f"the talker has {self.talker_config.num_code_groups} codebooks, its code predictor "
                f"{predictor.num_code_groups}"
            )
        self.speaker_encoder_config: Any = Qwen3TTSSpeakerConfig(**_as_mapping(speaker_encoder_config))
        self.tts_model_type = tts_model_type
        self.tts_pad_token_id, self.tts_bos_token_id = tts_pad_token_id, tts_bos_token_id
        self.tts_eos_token_id = tts_eos_token_id
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)

    def get_text_config(self, *args: object, **kwargs: object) -> Qwen3Config:
        """That of the talker, which has the sizes of the layers."""
        return self.talker_config  # type: ignore[no-any-return]


def _block_settings(values: Mapping[str, object]) -> Qwen3Config:
    """The settings of Qwen3's blocks. The talker counts every position alike in time, height and width, so its rotary
    embedding in three parts is the plain one."""
    values = _without_type(values)
    scaling = values.pop("rope_scaling", None) or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_scaling is of type {kind!r}; known is 'default'")
    rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    values.setdefault("rope_parameters", rope)
    values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    return Qwen3Config(**values)


def _as_mapping(given: Mapping[str, object] | PreTrainedConfig | None) -> JsonObject:
    if isinstance(given, PreTrainedConfig):
        return given.to_dict()
    return dict(given or {})


def _without_type(values: Mapping[str, object]) -> JsonObject:
    return {key: value for key, value in values.items() if key != "model_type"}
