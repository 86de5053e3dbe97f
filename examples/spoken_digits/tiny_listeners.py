"""Two models that hear, with their real processors: a Whisper that writes down what is said, and the thinker of a
Qwen2.5-Omni that answers questions about it. The folders hold no weights: training starts from scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()  # processors import torchvision, which may be built for another torch

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import (  # noqa: E402
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperProcessor,
    WhisperTokenizerFast,
)

WINDOW_S = 1
"""The longest sound, in seconds; shorter ones are filled up with silence."""
FRAMES = 100 * WINDOW_S
MEL_BINS = 40
WIDTH = 64
WHISPER_TOKENS = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>", "<|pad|>")
OMNI_TOKENS = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "turn_start_token": "<|im_start|>",
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{{- '<|audio_bos|><|AUDIO|><|audio_eos|>' if part.type == 'audio' else part.text }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def byte_pairs(special: Sequence[str], texts: Sequence[str], merges: int) -> Tokenizer:
    """A byte-level BPE, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 256 + merges,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def hearing() -> WhisperFeatureExtractor:
    """Log-mel spectra of a second, a hundred frames."""
    return WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=WINDOW_S)


def write_recogniser(folder: Path, words: Sequence[str]) -> None:
    """Write Whisper's configuration, processor and generation configuration; every word of `words` is one token."""
    tokenizer = WhisperTokenizerFast(
        tokenizer_object=byte_pairs(
            WHISPER_TOKENS, [word + "".join(f" {word}" for word in words) for word in words], 128
        ),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        pad_token="<|pad|>",
    )
    end, start, english, transcribe, no_times, padding = tokenizer.convert_tokens_to_ids(list(WHISPER_TOKENS))
    common: dict[str, Any] = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": padding}
    WhisperConfig(
        architectures=["WhisperForConditionalGeneration"],
        dtype="float32",
        vocab_size=len(tokenizer),
        num_mel_bins=MEL_BINS,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        max_source_positions=FRAMES // 2,
        max_target_positions=16,
        decoder_start_token_id=start,
        **common,
    ).save_pretrained(folder)
    WhisperProcessor(hearing(), tokenizer).save_pretrained(folder)
    GenerationConfig(
        decoder_start_token_id=start,
        no_timestamps_token_id=no_times,
        is_multilingual=True,
        lang_to_id={"<|en|>": english},
        task_to_id={"transcribe": transcribe},
        language="en",
        task="transcribe",
        **common,
    ).save_pretrained(folder)


def write_question_answerer(folder: Path, texts: Sequence[str]) -> None:
    """Write a thinker's configuration, processor and generation configuration; `texts` teach the tokenizer its merges.
    Its eyes are as small as they can be: nobody shows it anything."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs(list(OMNI_TOKENS.values()), texts, 96),
        eos_token=OMNI_TOKENS["eos_token"],
        pad_token=OMNI_TOKENS["pad_token"],
        extra_special_tokens={
            name: token for name, token in OMNI_TOKENS.items() if name not in ("eos_token", "pad_token")
        },
    )
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in OMNI_TOKENS.items()}
    ends = {"eos_token_id": ids["eos_token"], "pad_token_id": ids["pad_token"]}
    Qwen2_5OmniThinkerConfig(
        architectures=["Qwen2_5OmniThinkerForConditionalGeneration"],
        dtype="float32",
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
            "tie_word_embeddings": True,
            **ends,
        },
        audio_config={
            "num_mel_bins": MEL_BINS,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 2 * WIDTH,
            "d_model": WIDTH,
            "max_source_positions": FRAMES // 2,
            "n_window": FRAMES // 2,
            "output_dim": WIDTH,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 1,
            "out_hidden_size": WIDTH,
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [0],
        },
        audio_token_index=ids["audio_token"],
        image_token_index=ids["image_token"],
        video_token_index=ids["video_token"],
        audio_start_token_id=ids["audio_bos_token"],
        audio_end_token_id=ids["audio_eos_token"],
        vision_start_token_id=ids["vision_bos_token"],
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(),
        video_processor=Qwen2VLVideoProcessor(),
        feature_extractor=hearing(),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    GenerationConfig(do_sample=False, max_new_tokens=8, **ends).save_pretrained(folder)
