"""Writes the example of a model that speaks digits: clips, a codec that is trained on them, rows with their codes, and
a tiny Qwen3-TTS without weights.

Run `python examples/speaking_digits/make_speaking_digits.py [FOLDER]` (default `runs/speaking_digits`). The speech is
synthetic: eSpeak NG says it, as in `examples/spoken_digits`, whose script is used here.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

sys.path.insert(0, str(Path(__file__).parents[1] / "spoken_digits"))

from make_spoken_digits import WORDS, Clip, check_speaker, say
from tiny_codec import CODEBOOKS, CODES, codes_of, padded, train_decoder, write_codec
from tiny_listeners import byte_pairs
from transformers import GenerationConfig, PreTrainedTokenizerFast

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.models.qwen3tts.configuration_qwen3tts import Qwen3TTSConfig

SEED = 0
VOICES = {"Ada": "en-us+f3", "Ben": "en-gb+m3", "Cleo": "en-gb-scotland+f5", "Dan": "en-us+m7"}
"""What they are called → voices of eSpeak NG."""
TAKES, TEST_TAKES = 6, 3
SPEEDS, PITCHES = (150, 190), (40, 60)
MARKS = {
    "codec_pad_id": 64, "codec_bos_id": 65, "codec_eos_token_id": 66, "codec_think_id": 67, "codec_nothink_id": 68,
    "codec_think_bos_id": 69, "codec_think_eos_id": 70,
}  # fmt: skip
FIRST_VOICE, TALKER_TOKENS = 72, 80
TEXT_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
BLOCKS = {
    "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 24, "max_position_embeddings": 256,
}  # fmt: skip


def plan_clips() -> Iterator[tuple[str, Clip]]:
    """Who says what: each voice each digit as often, each time at another speed and pitch."""
    draw = random.Random(SEED)
    for name, voice in VOICES.items():
        for take in range(TAKES):
            for digit in range(len(WORDS)):
                path = f"clips/{name}-{take}-{digit}.wav"
                yield name, Clip(path, digit, voice, draw.randint(*SPEEDS), draw.randint(*PITCHES))


def write_model(folder: Path) -> None:
    """Configuration and tokenizer of a talker and its code predictor."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs(TEXT_MARKS, [*WORDS, "assistant\n"], 64),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    pad, begin, end = tokenizer.convert_tokens_to_ids(list(TEXT_MARKS[3:]))
    talker: dict[str, Any] = BLOCKS | MARKS | {
        "text_vocab_size": len(tokenizer),
        "text_hidden_size": 64,
        "vocab_size": TALKER_TOKENS,
        "num_code_groups": CODEBOOKS,
        "spk_id": {name.lower(): FIRST_VOICE + number for number, name in enumerate(VOICES)},
        "code_predictor_config": BLOCKS | {"vocab_size": CODES, "num_code_groups": CODEBOOKS},
    }  # fmt: skip
    Qwen3TTSConfig(
        talker_config=talker,
        tts_model_type="custom_voice",
        tts_pad_token_id=pad,
        tts_bos_token_id=begin,
        tts_eos_token_id=end,
        architectures=["Qwen3TTSForConditionalGeneration"],
        dtype="float32",
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = GenerationConfig(do_sample=True, temperature=0.7, top_k=20, repetition_penalty=1.0, max_new_tokens=24)
    settings.save_pretrained(folder)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> int:
    """Write the example and say what it is."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/speaking_digits")
    try:
        check_speaker()
    except MMError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    data = folder / "data"
    (data / "clips").mkdir(parents=True, exist_ok=True)
    planned = list(plan_clips())
    clips = []
    for _, clip in planned:
        say(clip, data)
        clips.append(padded(soundfile.read(data / clip.name, dtype="float32")[0]))
    print(f"{data}  {len(clips)} clips of {len(VOICES)} voices")
    codes = codes_of(clips, np.random.default_rng(SEED))
    rows = [
        {"id": clip.name, "text": clip.word, "speaker": name, "audio_codes": told.tolist()}
        for (name, clip), told in zip(planned, codes, strict=True)
    ]
    random.Random(SEED).shuffle(rows)
    write_rows(data / "train.jsonl", rows)
    asked = [
        {"id": f"{name} {word} {take}", "task": name, "text": word, "speaker": name}
        for take in range(TEST_TAKES) for name in VOICES for word in WORDS
    ]  # fmt: skip
    write_rows(data / "test.jsonl", asked)
    write_model(folder / "model")
    write_codec(train_decoder(clips, codes, SEED), folder / "model" / "speech_tokenizer")
    print(f"{folder}/model  a tiny Qwen3-TTS with its codec, still without weights of its own")
    return 0


if __name__ == "__main__":
    sys.exit(main())
