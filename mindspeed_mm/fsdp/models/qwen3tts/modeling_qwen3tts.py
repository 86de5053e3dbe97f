"""Qwen3-TTS (arXiv:2601.15621): a talker goes on from text with one token of speech a frame, the first codebook of a
12 Hz codec; from its hidden state a small code predictor says the frame's other codebooks, one after the other.

Modules are named as the released weights are; the blocks are transformers' Qwen3, and the speaker encoder is that of
Qwen2.5-Omni. Shapes: B rows of L places, T places of all rows, N frames among them, G codebooks, D the talker's width.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3Model
from transformers.activations import ACT2FN
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

from mindspeed_mm.fsdp.models.behaviour.spoken_frames import CODE_LOSS_FACTOR, SpokenFrames, SpokenOutput
from mindspeed_mm.fsdp.models.qwen3tts.configuration_qwen3tts import Qwen3TTSConfig
from mindspeed_mm.fsdp.ops.host_values import host_values
from mindspeed_mm.fsdp.utils.register import model_register


class Qwen3TTSTalkerModel(Qwen3Model):
    """Qwen3's blocks over two tables: of text, and of the first codebook with its marks.

    Args:
        config: `talker_config`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.embed_tokens
        self.codec_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.text_embedding = nn.Embedding(config.text_vocab_size, config.text_hidden_size)


class Qwen3TTSPredictorModel(Qwen3Model):
    """Qwen3's blocks over a table for each codebook but the first.

    Args:
        config: `code_predictor_config`.
        width: Of the tables, which is that of the talker.
    """

    def __init__(self, config: Any, width: int) -> None:
        super().__init__(config)
        del self.embed_tokens
        tables = (nn.Embedding(config.vocab_size, width) for _ in range(config.num_code_groups - 1))
        self.codec_embedding = nn.ModuleList(tables)


class Qwen3TTSCodePredictor(nn.Module):
    """The codebooks behind the first, of frame after frame: the parts that `SpokenFrames` puts to use.

    Args:
        config: `code_predictor_config`.
        width: Of the talker.
    """

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        self.model = Qwen3TTSPredictorModel(config, width)
        others = range(config.num_code_groups - 1)
        self.lm_head = nn.ModuleList(nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in others)
        self.small_to_mtp_projection: nn.Module = nn.Identity()
        if width != config.hidden_size:
            self.small_to_mtp_projection = nn.Linear(width, config.hidden_size)


class Qwen3TTSTextProjection(nn.Module):
    """From the width of text to that of the talker.

    Args:
        config: `talker_config`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.text_hidden_size, config.text_hidden_size)
        self.linear_fc2 = nn.Linear(config.text_hidden_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(…, text width) → (…, D)."""
        projected: torch.Tensor = self.linear_fc2(self.act_fn(self.linear_fc1(text)))
        return projected


class Qwen3TTSTalker(nn.Module):
    """Tables, blocks and heads of speech.

    Args:
        config: `talker_config`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        predictor: Qwen3Config = config.code_predictor_config
        predictor._attn_implementation = config._attn_implementation
        self.model = Qwen3TTSTalkerModel(config)
        self.text_projection = Qwen3TTSTextProjection(config)
        self.codec_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.code_predictor = Qwen3TTSCodePredictor(predictor, config.hidden_size)


@model_register.register("qwen3_tts")
class Qwen3TTSForConditionalGeneration(PreTrainedModel):
    """The talker with its code predictor, and in `base` models what hears a speaker, which is not trained: published
    fine-tuning takes its embeddings as they are.

    Args:
        config: Sizes and marks.
    """

    config_class = Qwen3TTSConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _no_split_modules: ClassVar[list[str]] = ["Qwen3DecoderLayer"]
    code_loss_factor = CODE_LOSS_FACTOR

    def __init__(self, config: Qwen3TTSConfig) -> None:
        super().__init__(config)
        self.talker = Qwen3TTSTalker(config.talker_config)
        if config.tts_model_type == "base":
            # Frozen here, so that no plan or optimizer takes it for trained.
            self.speaker_encoder = ECAPA_TimeDelayNet(config.speaker_encoder_config).requires_grad_(False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of text; codes of speech have embeddings of their own."""
        return self.talker.model.text_embedding

    def get_output_embeddings(self) -> nn.Module:
        """The head of the first codebook."""
        return self.talker.codec_head

    def get_decoder(self) -> nn.Module:
        """Blocks and code predictor together: neither stages nor ranks of a sequence can part them, as the predictor
        goes on from the hidden state in front of each frame."""
        return self.talker

    def forward(
        self,
        input_ids: torch.Tensor,
        codec_ids: torch.Tensor,
        frame_places: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        speaker_places: torch.Tensor | None = None,
        speaker_features: torch.Tensor | None = None,
        speaker_frames: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> SpokenOutput:
        """What each place stands for is the sum of its text and of its codes.

        Args:
            input_ids: (B, L) of text.
            codec_ids: (B, L, G) codes; the first of a place may be a mark, or negative where there is none. A place has
                the others where it is a frame.
            frame_places: (N,) places of the frames in the flattened rows. No row begins with one.
            attention_mask: (B, L), 1 on real tokens.
            position_ids: (B, L).
            speaker_places: (S,) places of speakers in the flattened rows.
            speaker_features: (frames, mels) spectra of the speakers, one behind the other.
            speaker_frames: (S,) frames of each.
            labels: (B, L) of the first codebook, not shifted; for the model's own loss.
        """
        talker = self.talker
        frames = SpokenFrames(codec_ids, frame_places, talker.model.codec_embedding, talker.code_predictor)
        embeds_TD = frames.added_to(self.text_at(input_ids.flatten()))
        if speaker_places is not None and speaker_features is not None and speaker_frames is not None:
            heard = self.hear(speaker_features, host_values(speaker_frames))
            embeds_TD = embeds_TD.index_add(0, speaker_places, heard.to(embeds_TD.dtype))
        hidden_BLD = talker.model(
            inputs_embeds=embeds_TD.unflatten(0, input_ids.shape),
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
        ).last_hidden_state
        return frames.output(hidden_BLD, talker.codec_head, labels)

    def text_at(self, ids: torch.Tensor) -> torch.Tensor:
        """What text tokens (…) add to their places: (…, D)."""
        text: torch.Tensor = self.talker.text_projection(self.talker.model.text_embedding(ids))
        return text

    @torch.no_grad()
    def hear(self, features: torch.Tensor, frames: list[int]) -> torch.Tensor:
        """Embeddings (speakers, D), of one spectrum after the other: padding would be heard."""
        features = features.to(self.speaker_encoder.fc.weight.dtype)
        return torch.cat([self.speaker_encoder(own[None]) for own in features.split(frames)])


def tell_transformers() -> None:
    """Let transformers' Auto classes find the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoConfig.register(Qwen3TTSConfig.model_type, Qwen3TTSConfig, exist_ok=True)
    AutoModelForCausalLM.register(Qwen3TTSConfig, Qwen3TTSForConditionalGeneration, exist_ok=True)
