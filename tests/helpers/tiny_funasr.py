"""A Fun-ASR-Nano small enough for tests, made without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.fsdp.utils.fun_asr_features import provide_fun_asr_features
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from tests.helpers.tiny_processors import byte_tokenizer

prepare_for_transformers()

import transformers  # noqa: E402  (the guard comes first)

MEL_BINS = 16
SPECIAL = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "turn_start_token": "<|im_start|>",
    "audio_token": "<|object_ref_start|>",
}
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{{- '<|object_ref_start|>' if part.type == 'audio' else part.text }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def build_processor() -> Any:
    """Its real processor, with 16 mel bands."""
    provide_fun_asr_features()
    from transformers import (
        FunAsrNanoFeatureExtractor,
    )  # `transformers` above is no longer it, once processors are used

    return transformers.FunAsrNanoProcessor(
        FunAsrNanoFeatureExtractor(feature_size=MEL_BINS),
        byte_tokenizer(SPECIAL, TEMPLATE),
        chat_template=TEMPLATE,
    )


def make_tiny_funasr(folder: Path, *, seed: int = 0, spread: float = 0.02) -> Path:
    """Write model and processor; `spread` is the standard deviation of the weights."""
    torch.manual_seed(seed)
    processor = build_processor()
    tokenizer = processor.tokenizer
    text = {"model_type": "qwen3", "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    layers: dict[str, Any] = {"num_attention_heads": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    config = transformers.FunAsrNanoConfig(
        text_config=text | {"initializer_range": spread, "eos_token_id": tokenizer.eos_token_id},
        audio_config={
            "model_type": "fun_asr_nano_encoder", "num_mel_bins": MEL_BINS, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 3, "num_timestamp_prediction_layers": 1, "fsmn_kernel_size": 5,
            "max_position_embeddings": 128, "initializer_range": spread, **layers,
        },
        adaptor_config={
            "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1, "projector_hidden_size": 48, **layers,
        },
        audio_token_id=processor.audio_token_id, initializer_range=spread,
    )  # fmt: skip
    transformers.FunAsrNanoForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    transformers.GenerationConfig(**ids).save_pretrained(folder)
    return folder
