"""A Qwen2.5-Omni thinker small enough for tests, made without a download, and rows for it: text, pictures and sound,
read by a data set that is registered as a plugin's is (`training.plugin: [tests.helpers.tiny_omni]`).
"""

from __future__ import annotations

import json
import random
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from ruamel.yaml import YAML
from torch.utils.data import Dataset

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.utils.register import data_register
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from tests.helpers import tiny_models
from tests.helpers.tiny_run import STEADY

prepare_for_transformers()

from transformers import (  # noqa: E402  (the guard comes first)
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)

SAMPLING_RATE = 16_000
MEL_BINS = 16
IGNORED = -100
PICTURE, SOUND = "<|vision_bos|><|IMAGE|><|vision_eos|>", "<|audio_bos|><|AUDIO|><|audio_eos|>"
MEDIA = ((1, 0), (0, 1), (0, 0), (2, 1), (0, 2), (1, 1))
"""Pictures and sounds of one row after the other."""

SPECIAL_TOKENS = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
    "turn_start_token": "<|im_start|>",
}

_TEXT: dict[str, Any] = {
    "vocab_size": tiny_models.VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": tiny_models.PATCH_SIZE,
    "spatial_merge_size": tiny_models.MERGE_SIZE,
    "temporal_patch_size": 2,
    "window_size": 4 * tiny_models.PATCH_SIZE,
    "fullatt_block_indexes": [1],
}
_AUDIO: dict[str, Any] = {
    "num_mel_bins": MEL_BINS,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "d_model": 32,
    "max_source_positions": 50,
    "n_window": 8,
    "output_dim": 32,
}


def make_tiny_omni(folder: Path, *, seed: int = 0, **text: Any) -> Path:
    """A thinker's folder with its processor: windows of 2 × 2 merged patches, sound in chunks of 16 frames.

    Args:
        folder: Where to write; made when absent.
        seed: Of the random weights.
        text: Fields of the text configuration to change, e.g. `num_hidden_layers=4`.
    """
    processor = _processor()
    ids = {name: processor.tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL_TOKENS.items()}
    config = Qwen2_5OmniThinkerConfig(
        text_config=_TEXT | {"eos_token_id": ids["eos_token"], "pad_token_id": ids["pad_token"]} | text,
        vision_config=dict(_VISION),
        audio_config=dict(_AUDIO),
        audio_token_index=ids["audio_token"],
        image_token_index=ids["image_token"],
        video_token_index=ids["video_token"],
        audio_start_token_id=ids["audio_bos_token"],
        audio_end_token_id=ids["audio_eos_token"],
        vision_start_token_id=ids["vision_bos_token"],
    )
    tiny_models._save(Qwen2_5OmniThinkerForConditionalGeneration, config, folder, seed, torch.float32)
    processor.save_pretrained(folder)
    return folder


def make_tiny_omni_run(folder: Path, text: dict[str, Any], **sections: dict[str, Any]) -> Path:
    """Write model, rows and `run.yaml` into `folder`; returns the YAML's path. `sections` are merged into it."""
    make_tiny_omni(folder / "model", **text)
    config: dict[str, Any] = {
        "model": {"model_name_or_path": str(folder / "model")},
        "data": {
            "dataset_param": {
                "dataset_type": "tiny_omni_rows",
                "basic_parameters": {"dataset": str(make_omni_rows(folder))},
                "preprocess_parameters": {"model_name_or_path": str(folder / "model")},
            },
            "dataloader_param": {"num_workers": 0, "shuffle": True},
        },
        "parallel": {},
        "training": {"plugin": ["tests.helpers.tiny_omni"], "lr": 1e-3, "log_interval": 1, "seed": 7, **STEADY},
    }
    for name, content in sections.items():
        config[name].update(content)
    path = folder / "run.yaml"
    with path.open("w", encoding="utf-8") as file:
        YAML().dump(config, file)
    return path


def make_omni_rows(folder: Path, count: int = 24, seed: int = 0) -> Path:
    """`count` questions about pictures and sounds of uneven sizes and lengths; returns the JSONL."""
    draw = random.Random(seed)
    (folder / "media").mkdir(parents=True)
    rows = []
    for row in range(count):
        pictures, sounds = MEDIA[row % len(MEDIA)]
        images = [_draw_picture(folder / f"media/{row}_{number}.png", draw) for number in range(pictures)]
        audio = [_draw_sound(folder / f"media/{row}_{number}.wav", draw) for number in range(sounds)]
        answer = " ".join(draw.choice(("red", "loud", "far")) for _ in range(draw.randint(1, 9)))
        rows.append({"id": f"row{row}", "images": images, "audio": audio, "answer": answer})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@data_register.register("tiny_omni_rows")
class OmniRows(Dataset[dict[str, Any]]):
    """Rows as the model's own processor encodes them; only answers are trained."""

    def __init__(self, basic_param: Any, preprocess_param: Any, dataset_param: Any) -> None:
        with Path(basic_param.dataset).open(encoding="utf-8") as file:
            self._rows = [json.loads(line) for line in file]
        self._processor = Qwen2_5OmniProcessor.from_pretrained(preprocess_param.model_name_or_path)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        media = PICTURE * len(row["images"]) + SOUND * len(row["audio"])
        question = f"<|im_start|>user\n{media}What is it like?<|im_end|>\n<|im_start|>assistant\n"
        encoded = self._processor(
            text=question,
            images=[Image.open(name) for name in row["images"]] or None,
            audio=[_read_sound(Path(name)) for name in row["audio"]] or None,
            return_tensors="pt",
        )
        prompt = encoded.pop("input_ids")[0]
        answer = torch.tensor(self._processor.tokenizer(f"{row['answer']}<|im_end|>").input_ids)
        labels = torch.cat([torch.full_like(prompt, IGNORED), answer])
        encoded.pop("attention_mask")
        kept = {key: encoded[key] for key in _JOINED if key in encoded}
        return {"sample_id": row["id"], "input_ids": torch.cat([prompt, answer]), "labels": labels, **kept}

    def collate_fn(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """Rows padded on the right; media of all rows one after the other."""
        pad = self._processor.tokenizer.pad_token_id
        shifted = [torch.cat([sample["labels"][1:], torch.tensor([IGNORED])]) for sample in samples]
        batch: Batch = {
            "input_ids": _padded([sample["input_ids"] for sample in samples], pad),
            "attention_mask": _padded([torch.ones_like(sample["input_ids"]) for sample in samples], 0),
            "labels": _padded([sample["labels"] for sample in samples], IGNORED),
            "shift_labels": _padded(shifted, IGNORED),
            "sample_ids": [sample["sample_id"] for sample in samples],
        }
        for key in _JOINED:
            if found := [sample[key] for sample in samples if key in sample]:
                batch[key] = torch.cat(found)
        return batch


_JOINED = ("pixel_values", "image_grid_thw", "input_features", "feature_attention_mask")


def _padded(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def _draw_picture(path: Path, draw: random.Random) -> str:
    width, height = draw.choice(((32, 32), (64, 32), (48, 64)))
    Image.frombytes("RGB", (width, height), draw.randbytes(width * height * 3)).save(path)
    return str(path)


def _draw_sound(path: Path, draw: random.Random) -> str:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLING_RATE)
        file.writeframes(draw.randbytes(2 * draw.randint(1_000, 8_000)))
    return str(path)


def _read_sound(path: Path) -> np.ndarray:
    """Samples between -1 and 1."""
    with wave.open(str(path), "rb") as file:
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2").astype(np.float32) / 2**15


def _processor() -> Qwen2_5OmniProcessor:
    patches = {"patch_size": tiny_models.PATCH_SIZE, "merge_size": tiny_models.MERGE_SIZE, "temporal_patch_size": 2}
    side = tiny_models.PATCH_SIZE * tiny_models.MERGE_SIZE
    area = {"shortest_edge": side**2, "longest_edge": tiny_models.MAX_PIXELS}
    return Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(size=dict(area), **patches),
        video_processor=Qwen2VLVideoProcessor(size=dict(area), **patches),
        feature_extractor=WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=1),
        tokenizer=tiny_models.build_tokenizer(SPECIAL_TOKENS),
    )
