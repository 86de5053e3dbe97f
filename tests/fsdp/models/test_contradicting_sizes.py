"""Towers, decoders and processors whose sizes contradict one another are refused by name, before any weight is read."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import transformers

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.models.vocabulary import check_processor
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.tasks.answer.generation import load_generator
from tests.helpers.mindspeed_files import make_folder
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_processors import byte_tokenizer


def checked(folder: Path, section: str = "", **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (config[section] if section else config).update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    model = ModelHub.build(ModelArguments(model_name_or_path=str(folder), train_from_scratch=True))
    check_processor(model, load_processor(folder))


@pytest.mark.parametrize(
    ("family", "section", "changes", "words"),
    [
        ("qwen3_vl", "vision_config", {"out_hidden_size": 48}, r"out_hidden_size  is 48, but the decoder's .* is 32"),
        ("qwen3_vl", "vision_config", {"patch_size": 16}, r"patch_size  is 16, the image processor's patch_size is 8"),
        ("qwen3_vl", "vision_config", {"spatial_merge_size": 4}, r"is 4, the image processor's merge_size is 2"),
        ("qwen3_vl", "vision_config", {"temporal_patch_size": 1}, r"is 1, the image processor's temporal_patch_size"),
        ("qwen3_omni", "audio_config", {"output_dim": 48}, r"audio_config.output_dim  is 48, but the decoder's"),
        ("qwen3_omni", "audio_config", {"num_mel_bins": 80}, r"is 80, the feature extractor's feature_size is 16"),
        ("kimi_k25", "vision_config", {"patch_size": 16}, r"is 16, the image processor's patch_size is 8"),
        ("step3_vl", "vision_config", {"patch_size": 8}, r"is 8, the image processor's vision_patch_size is 4"),
    ],
)
def test_it_names_both(family: str, section: str, changes: dict[str, int], words: str, tmp_path: Path) -> None:
    folder = make_folder(family, tmp_path)
    checked(folder)
    with pytest.raises(ModelFolderError, match=words):
        checked(folder, section, **changes)


def make_ovis2(folder: Path) -> Path:
    """Its processor turns `<image>` into `<IMG_ATOM>`, which is what the model looks for."""
    marks = ("ATOM", "START", "GRID", "COL", "ROW", "END")
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "image_token": "<image>"}
    tokenizer = byte_tokenizer(special | {f"{mark}_token": f"<IMG_{mark}>" for mark in marks}, None)
    atom, *indicators = tokenizer.convert_tokens_to_ids([f"<IMG_{mark}>" for mark in marks])
    processor = transformers.Ovis2Processor(transformers.Ovis2ImageProcessor(), tokenizer, image_seq_length=4)
    processor.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    words = {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "model_type": "qwen2"}
    transformers.Ovis2Config(
        vision_config={**sizes, "vocab_size": 64},
        text_config=sizes | words,
        image_token_id=atom,
        visual_indicator_token_ids=indicators,
        vocab_size=len(tokenizer),
        hidden_size=32,
        architectures=["Ovis2ForConditionalGeneration"],
    ).save_pretrained(folder)
    return folder


def test_a_processor_may_fill_in_another_token_than_its_mark(tmp_path: Path) -> None:
    folder = make_ovis2(tmp_path)
    checked(folder)
    with pytest.raises(ModelFolderError, match=r"the model looks for images at token 0, the processor marks them by"):
        checked(folder, image_token_id=0)


def test_a_tokenizer_of_another_model_is_told(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "model", vocab_size=1000)
    with pytest.warns(UserWarning, match=r"the tokenizer has 3\d\d tokens, the model's embedding 1,000 rows"):
        load_generator(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_generator(make_tiny_qwen3(tmp_path / "rounded", vocab_size=400))
