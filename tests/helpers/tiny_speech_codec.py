"""A small model folder of Qwen3-TTS that speaks: talker, tokenizer and the 12 Hz codec, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.released_layouts import merged
from tests.helpers.tiny_sounds import sound_bytes, tone
from tests.helpers.tiny_speech import CODEBOOKS, CODES, SMALL_QWEN3TTS, speech_tokenizer

import transformers  # isort: skip  (after the guard of the lines above)

FRAME_SAMPLES = 24
"""Of the small codec."""
DECODER: dict[str, Any] = {
    "codebook_dim": 8, "codebook_size": CODES, "decoder_dim": 16, "head_dim": 8, "hidden_size": 16,
    "intermediate_size": 20, "latent_dim": 12, "num_attention_heads": 2, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "num_quantizers": CODEBOOKS, "rope_theta": 10000, "sliding_window": 4,
    "upsample_rates": [3, 2], "upsampling_ratios": [2, 2],
}  # fmt: skip
ENCODER: dict[str, Any] = {
    "codebook_dim": 8, "codebook_size": 32, "frame_rate": 1000.0, "head_dim": 8, "hidden_size": 16,
    "intermediate_size": 20, "num_attention_heads": 2, "num_filters": 4, "num_hidden_layers": 1,
    "num_key_value_heads": 2, "num_quantizers": CODEBOOKS + 1, "sliding_window": 6, "upsample_groups": 16,
    "upsampling_ratios": [4, 3], "vector_quantization_hidden_dimension": 8,
}  # fmt: skip
_BLOCKS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip

VOICE = sound_bytes(tone(0.4, 24000, 300.0), 24000)
NAMED: dict[str, Any] = {
    "tts_model_type": "custom_voice",
    "talker_config": {
        "spk_id": {"vera": 70, "uncle": 71}, "codec_language_id": {"northern": 59},
        "spk_is_dialect": {"vera": False, "uncle": "northern"},
    },
}  # fmt: skip
"""What makes a folder one with voices of its own."""


def write_speech_codec(folder: Path) -> Path:
    """`speech_tokenizer/` of a model folder, without a second half of Mimi, as released."""
    from mindspeed_mm.fsdp.models.qwen3tts.speech_codec import Qwen3TTSSpeechDecoder, decoder_config  # behind the guard

    folder = folder / "speech_tokenizer"
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    decoder = Qwen3TTSSpeechDecoder(decoder_config(DECODER))
    encoder = transformers.MimiModel(transformers.MimiConfig(**ENCODER))
    encoder.save_pretrained(folder / "encoder")
    weights = {f"decoder.{name}": tensor for name, tensor in decoder.state_dict().items()}
    for name, tensor in load_file(folder / "encoder" / "model.safetensors").items():
        if not name.startswith(("decoder", "upsample")):
            weights[f"encoder.{name}"] = tensor
    for path in (folder / "encoder").iterdir():
        path.unlink()
    (folder / "encoder").rmdir()
    drawn = {}
    for name, tensor in weights.items():
        if not tensor.is_floating_point():
            drawn[name] = tensor
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("cluster_usage"):
            drawn[name] = noise.abs() + 0.5
        elif name.startswith(f"decoder.decoder.{len(DECODER['upsample_rates']) + 2}."):
            drawn[name] = noise * 0.0005  # so that few samples are cut off at -1 and 1
        else:
            drawn[name] = noise * 0.3 + (1.0 if name.endswith(("norm.weight", "scale")) else 0.0)
    save_file({name: tensor.contiguous() for name, tensor in drawn.items()}, folder / "model.safetensors")
    config = {"model_type": "qwen3_tts_tokenizer_12hz", "decoder_config": DECODER, "encoder_config": ENCODER,
              "encoder_valid_num_quantizers": CODEBOOKS, "encode_downsample_rate": FRAME_SAMPLES,
              "decode_upsample_rate": FRAME_SAMPLES, "input_sample_rate": 24000,
              "output_sample_rate": 24000}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_speaker(folder: Path, **settings: Any) -> Path:
    """The whole folder; `settings` are merged into its config.json."""
    from mindspeed_mm.fsdp.models.qwen3tts.configuration_qwen3tts import Qwen3TTSConfig  # behind the guard
    from mindspeed_mm.fsdp.models.qwen3tts.modeling_qwen3tts import Qwen3TTSForConditionalGeneration

    tokenizer = speech_tokenizer()
    marks = {"tts_pad_token_id": "<|endoftext|>", "tts_bos_token_id": "<|im_start|>", "tts_eos_token_id": "<|im_end|>"}
    blocks = {"talker_config": _BLOCKS | {"code_predictor_config": _BLOCKS | {"hidden_size": 24, "head_dim": 6}}}
    numbers = {name: tokenizer.convert_tokens_to_ids(token) for name, token in marks.items()}
    config = merged(merged(merged(blocks, SMALL_QWEN3TTS), {"speaker_encoder_config": {"enc_dim": 32}}), settings)
    model = Qwen3TTSForConditionalGeneration(Qwen3TTSConfig(**config, **numbers))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(noise + (1.0 if parameter.dim() == 1 else 0.0))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_speech_codec(folder)
    return folder
