"""The settings of MOSS-TTS with a delay pattern, as its released config.json has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedConfig, Qwen3Config

from mindspeed_mm.core.json_file import JsonObject


class MossTTSDelayConfig(PreTrainedConfig):
    """A Qwen3 with tables and heads for the codebooks of a codec.

    Args:
        language_config: Of Qwen3.
        n_vq: Codebooks.
        audio_vocab_size: Codes of each.
        audio_pad_code: The row of a codebook's table that stands where there is no code; it is never predicted.
        pad_token_id: Text token of padding; so are the next ones.
        im_start_token_id: Begins a turn.
        im_end_token_id: Ends a turn.
        audio_start_token_id: In front of speech.
        audio_end_token_id: Behind speech.
        audio_user_slot_token_id: Beside the codes of a voice that is given.
        audio_assistant_gen_slot_token_id: Beside codes of which the first codebook still has some.
        audio_assistant_delay_slot_token_id: Beside codes behind the end of the first codebook.
        sampling_rate: Samples of sound a second.
        kwargs: What every configuration has.

    Raises:
        ValueError: The row of no code is not the one behind all codes, or there is no codebook.
    """

    model_type = "moss_tts_delay"
    sub_configs: ClassVar[JsonObject] = {"language_config": Qwen3Config}

    def __init__(
        self,
        language_config: Mapping[str, object] | PreTrainedConfig | None = None,
        n_vq: int = 32,
        audio_vocab_size: int = 1024,
        audio_pad_code: int = 1024,
        pad_token_id: int = 151643,
        im_start_token_id: int = 151644,
        im_end_token_id: int = 151645,
        audio_start_token_id: int = 151652,
        audio_end_token_id: int = 151653,
        audio_user_slot_token_id: int = 151654,
        audio_assistant_gen_slot_token_id: int = 151656,
        audio_assistant_delay_slot_token_id: int = 151662,
        sampling_rate: int = 24000,
        **kwargs: Any,
    ) -> None:
        if audio_pad_code != audio_vocab_size:
            raise ValueError(f"audio_pad_code is {audio_pad_code}; known is audio_vocab_size, {audio_vocab_size}")
        if n_vq < 1:
            raise ValueError(f"n_vq is {n_vq}; there is at least one codebook")
        given = language_config
        if not isinstance(given, PreTrainedConfig):
            given = Qwen3Config(**{key: value for key, value in (given or {}).items() if key != "model_type"})
        self.language_config: Any = given
        self.n_vq, self.audio_vocab_size, self.audio_pad_code = n_vq, audio_vocab_size, audio_pad_code
        self.im_start_token_id, self.im_end_token_id = im_start_token_id, im_end_token_id
        self.audio_start_token_id, self.audio_end_token_id = audio_start_token_id, audio_end_token_id
        self.audio_user_slot_token_id = audio_user_slot_token_id
        self.audio_assistant_gen_slot_token_id = audio_assistant_gen_slot_token_id
        self.audio_assistant_delay_slot_token_id = audio_assistant_delay_slot_token_id
        self.sampling_rate = sampling_rate
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(pad_token_id=pad_token_id, **kwargs)

    def get_text_config(self, *args: object, **kwargs: object) -> Qwen3Config:
        """That of Qwen3, which has the sizes of the layers."""
        return self.language_config  # type: ignore[no-any-return]
