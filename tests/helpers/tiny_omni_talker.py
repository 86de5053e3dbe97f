"""A small Qwen3-Omni folder as it is released, written by transformers, with rows whose answers are spoken."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.helpers.released_layouts import merged
from tests.helpers.released_rows import ROWS, Row, write_rows
from tests.helpers.tiny_run import STEADY

import transformers  # isort: skip  (after the guard of the lines above)

CODEBOOKS, CODES = 4, 40
SPECIAL_CODES = 1024
"""Behind the codes of the first codebook stand marks; `generate` never says any but the last one of speech."""
MARKS = {
    "codec_bos_id": 41, "codec_eos_token_id": 42, "codec_pad_id": 43, "codec_nothink_id": 44, "codec_think_bos_id": 45,
    "codec_think_eos_id": 46,
}  # fmt: skip
VOICES = {"ethan": 47, "chelsie": 48}
ROW = ROWS["qwen3omni"]
_TEXT_MARKS = {
    "im_start_token_id": "<|im_start|>", "im_end_token_id": "<|im_end|>", "tts_pad_token_id": "<|endoftext|>",
    "tts_bos_token_id": "(", "tts_eos_token_id": ")", "system_token_id": "system", "user_token_id": "user",
    "assistant_token_id": "assistant",
}  # fmt: skip
_SMALL: dict[str, Any] = {
    "talker_config": {
        "thinker_hidden_size": 32, "accept_hidden_layer": 1, "num_code_groups": CODEBOOKS,
        "speaker_id": VOICES, **MARKS,
        "text_config": {"vocab_size": CODES + SPECIAL_CODES, "hidden_size": 24, "shared_expert_intermediate_size": 20},
        "code_predictor_config": {"hidden_size": 24, "vocab_size": CODES, "num_code_groups": CODEBOOKS},
    },
    "code2wav_config": {
        "codebook_size": CODES, "num_quantizers": CODEBOOKS, "decoder_dim": 16, "upsample_rates": [2, 2],
        "upsampling_ratios": [2], "num_key_value_heads": 4, "head_dim": 8,
    },
}  # fmt: skip


def tiny_config(tokenizer: Any) -> dict[str, Any]:
    """With the numbers of a tokenizer."""
    assert isinstance(ROW, Row)
    config = merged(ROW.tiny(tokenizer), _SMALL)
    thinker = config["thinker_config"]
    shared = ("audio_token_id", "image_token_id", "video_token_id", "vision_start_token_id", "audio_start_token_id",
              "position_id_per_seconds")  # fmt: skip
    config["talker_config"] |= {name: thinker[name] for name in shared}
    return config | {name: tokenizer.convert_tokens_to_ids(token) for name, token in _TEXT_MARKS.items()}


def write_omni(folder: Path) -> Path:
    """The folder; its keys are those of the record of the released size."""
    assert isinstance(ROW, Row)
    processor = ROW.processor()
    config = transformers.Qwen3OmniMoeConfig.from_dict(tiny_config(processor.tokenizer))
    torch.manual_seed(0)
    model = transformers.Qwen3OmniMoeForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def pattern_of(key: str) -> str:
    """A key as the records write it, with N for numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "N", key)


def write_spoken_rows(folder: Path, kinds: tuple[str, ...] = ("image", "audio"), count: int = 4) -> Path:
    """Questions about media with spoken answers, uneven in length; one with a system turn and an earlier answer."""
    path = write_rows(folder, kinds, count)
    draw = np.random.default_rng(0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["speaker"] = ("Ethan", "chelsie")[number % 2]
        row["audio_codes"] = draw.integers(0, CODES, (3 + 2 * (number % 3), CODEBOOKS)).tolist()
    system = {"role": "system", "content": "You are a helpful assistant."}
    earlier = [{"role": "user", "content": "Which digit?"}, {"role": "assistant", "content": "nine ten"}]
    rows[1]["messages"] = [system, *earlier, *rows[1]["messages"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_omni_run(folder: Path, **sections: Any) -> Path:
    """Model, rows and `run.yaml` in a folder; returns the YAML. `sections` are merged into it."""
    write_omni(folder / "model")
    rows = write_spoken_rows(folder / "rows")
    config = {
        "model": {"model_id": "qwen3_omni_talker", "model_name_or_path": str(folder / "model")},
        "data": {
            "dataset_param": {
                "dataset_type": "qwen3_omni_talker",
                "basic_parameters": {"dataset": str(rows), "dataset_dir": str(rows.parent), "cutoff_len": 4096},
                "preprocess_parameters": {"model_name_or_path": str(folder / "model")},
            },
            "dataloader_param": {"num_workers": 0, "shuffle": False},
        },
        "parallel": {},
        "training": {"lr": 1e-3, "micro_batch_size": 2, "train_iters": 2, "log_interval": 1, "seed": 7, **STEADY},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(merged(config, sections), indent=1), encoding="utf-8")  # JSON is YAML
    return path
