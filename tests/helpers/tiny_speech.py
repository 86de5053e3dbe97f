"""Rows of text with the codes of its speech, and what makes the generators of speech small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.tiny_processors import byte_tokenizer
from tests.helpers.tiny_sounds import sound_bytes, tone

COSYVOICE_CODES = 50
"""Of the small codec of CosyVoice."""
CODEBOOKS, CODES = 4, 40
"""Of the small codec of Qwen3-TTS."""
MARKS = {
    "codec_bos_id": 61, "codec_eos_token_id": 62, "codec_pad_id": 60, "codec_think_id": 63, "codec_nothink_id": 64,
    "codec_think_bos_id": 65, "codec_think_eos_id": 66,
}  # fmt: skip
SMALL_QWEN3TTS: dict[str, Any] = {
    "talker_config": {
        "text_vocab_size": 420, "text_hidden_size": 40, "vocab_size": 72, "num_code_groups": CODEBOOKS,
        "spk_id": {"vera": 70}, **MARKS,
        "code_predictor_config": {"hidden_size": 24, "vocab_size": CODES, "num_code_groups": CODEBOOKS},
    },
    "speaker_encoder_config": {
        "enc_dim": 32, "enc_channels": [8, 8, 8, 8, 24], "enc_attention_channels": 6, "enc_res2net_scale": 4,
        "enc_se_channels": 6, "mel_dim": 16,
    },
}  # fmt: skip
"""What is small in a configuration, beside the sizes of its blocks."""
MOSS_CODEBOOKS, MOSS_CODES = 3, 40
"""Of the small codec of MOSS-TTS."""
MOSS_MARKS = {
    "im_start_token_id": "<|im_start|>", "im_end_token_id": "<|im_end|>", "audio_start_token_id": "<|audio_start|>",
    "audio_end_token_id": "<|audio_end|>", "audio_user_slot_token_id": "<|audio_user_slot|>",
    "audio_assistant_gen_slot_token_id": "<|audio_gen_slot|>",
    "audio_assistant_delay_slot_token_id": "<|audio_delay_slot|>",
}  # fmt: skip
"""Key of its configuration → token."""
_TURNS = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
_SPECIAL = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "turn_start_token": "<|im_start|>"}


def speech_tokenizer() -> Any:
    """Of bytes, with the marks of turns."""
    return byte_tokenizer(_SPECIAL, None)


def moss_tokenizer() -> Any:
    """Of bytes, with the marks of turns and of sounds."""
    marks = {key.removesuffix("_id"): token for key, token in MOSS_MARKS.items()}
    return byte_tokenizer(_SPECIAL | marks, _TURNS)


def write_moss_rows(folder: Path, count: int = 4) -> Path:
    """Texts with frames of codes, uneven in length; some with one voice or two."""
    draw = np.random.default_rng(0)

    def codes(frames: int) -> list[list[int]]:
        return draw.integers(0, MOSS_CODES, (frames, MOSS_CODEBOOKS)).tolist()  # type: ignore[no-any-return]

    rows: list[dict[str, Any]] = []
    for number in range(count):
        row = {"audio": f"{number}.wav", "text": "seven one two"[: 6 + number], "audio_codes": codes(4 + number)}
        voices = ({}, {"ref_audio_codes": codes(2)}, {"reference_audio_codes": [codes(1), None, codes(3)]})
        rows.append(row | {"language": "English"} | voices[number % 3])
    return _written(folder, rows)


def write_cosyvoice_rows(folder: Path, count: int = 4) -> Path:
    """Texts with speech tokens, uneven in length."""
    draw = np.random.default_rng(0)
    rows = [
        {"utt": f"u{n}", "text": "seven one two"[: 6 + n], "speech_token": draw.integers(0, COSYVOICE_CODES, 20 + n)}
        for n in range(count)
    ]
    return _written(folder, [row | {"speech_token": row["speech_token"].tolist()} for row in rows])  # type: ignore[attr-defined]


def write_qwen3tts_rows(folder: Path, count: int = 4) -> Path:
    """Texts with frames of codes, uneven in length, each with a sound of its voice."""
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        name = f"voice{number}.wav"
        (folder / name).write_bytes(sound_bytes(tone(0.3 + 0.05 * number, 24000, 200 + 70 * number), 24000))
        codes = draw.integers(0, CODES, (5 + number, CODEBOOKS)).tolist()
        rows.append(
            {"audio": f"{number}.wav", "text": "seven one two"[: 6 + number], "audio_codes": codes, "ref_audio": name}
        )
    return _written(folder, rows)


def _written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
