"""data.json of MindSpeed-MM's readers of InternVL, DeepSeek-VL2 and Whisper: rows, folders and processor settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.provider.parse import parse
from mindspeed_mm.provider.translate import Translated, translate
from tests.helpers.tiny_internvl_chat import SPECIAL, make_tiny_internvl_chat

PICTURES: dict[str, Any] = {
    "dataset_type": "multimodal",
    "basic_parameters": {"data_path": "rows.jsonl", "data_folder": "media", "repeat_time": 1},
    "preprocess_parameters": {"image_reader_type": "torchvision", "train_pipeline": {"image": []}},
    "tokenizer_config": {"hub_backend": "hf", "from_pretrained": "model", "use_fast": False},
    "template_name": "internvl2_5",
    "image_size": 448,
    "group_by_length": True,
    "dynamic_image_size": True,
    "use_thumbnail": True,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 12,
    "max_num_frame": 32,
}
LOADER = {
    "dataloader_mode": "sampler",
    "shuffle": True,
    "drop_last": True,
    "pin_memory": True,
    "sampler_type": "BaseRandomBatchSampler",
    "collate_param": {"model_name": "internvl", "pad_id": 2},
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(dataset: dict[str, Any], **changes: Any) -> Translated:
    content = {"dataset_param": {**dataset, **changes}, "dataloader_param": LOADER}
    Path("data.json").write_text(json.dumps(content, indent=1))
    words = "--lr 1e-5 --train-iters 10 --micro-batch-size 1 --mm-data data.json --seq-length 512"
    return translate(parse(words.split(), {"WORLD_SIZE": "1"}))


def refusal(dataset: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        read(dataset, **changes)
    return str(raised.value)


def test_rows_with_pictures_in_tiles() -> None:
    translated = read(PICTURES)
    data = translated.arguments.data
    basic, preprocess = data.dataset_param.basic_parameters, data.dataset_param.preprocess_parameters
    assert (data.dataset_param.dataset_type, basic.dataset, basic.dataset_dir) == ("huggingface", "rows.jsonl", "media")
    assert (preprocess.model_name_or_path, preprocess.image_max_tiles) == ("model", 12)
    assert (preprocess.crop_to_patches, preprocess.video_maxlen, basic.cutoff_len) == (True, 32, 512)
    assert (data.dataloader_param.shuffle, data.dataloader_param.collate_param.model_name) == (True, None)
    told = "".join(translated.notes)
    assert "max_dynamic_patch 12 holds for each image of a row" in told
    assert "preprocess_parameters.train_pipeline, template_name, image_size, group_by_length have no effect" in told
    assert "these sizes also hold in inference, evaluation and the exported folder" in told
    whole = read(PICTURES, dynamic_image_size=False).arguments.data.dataset_param.preprocess_parameters
    assert (whole.crop_to_patches, whole.image_max_tiles) == (False, None)


SETS = {
    "zoo": {"data_path": "zoo.jsonl", "data_folder": "zoo", "repeat_time": 2},
    "half": {"data_path": "half.jsonl", "data_folder": "half", "repeat_time": 0.5},
    "once": {"data_path": "once.jsonl"},
}


@pytest.mark.parametrize("named", [True, False])
def test_several_sets_of_rows(named: bool) -> None:
    sets: Any = SETS if named else list(SETS.values())
    basic: Any = read(PICTURES, basic_parameters=sets).arguments.data.dataset_param.basic_parameters
    found = [(each.path, each.media_dir, each.repeats, each.share, each.name) for each in basic.dataset]
    names = SETS if named else (None, None, None)
    assert found == [
        (f"{name}.jsonl", media, repeats, share, called)
        for (name, media, repeats, share), called in zip(
            (("zoo", "zoo", 2, None), ("half", "half", None, 0.5), ("once", None, None, None)), names, strict=True
        )
    ]
    assert basic.dataset_dir is None
    paths = {"data_path": {"zoo": {"data_path": "zoo.jsonl"}, "once": {"data_path": "once.jsonl"}}}
    basic = read(PICTURES, basic_parameters=paths).arguments.data.dataset_param.basic_parameters
    assert [(each.path, each.name) for each in basic.dataset] == [("zoo.jsonl", "zoo"), ("once.jsonl", "once")]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"min_dynamic_patch": 2}, "min_dynamic_patch is 2. Set it to 1, or set min_patches"),
        ({"use_thumbnail": False}, "use_thumbnail is false, but a small view of the whole image always follows"),
        ({"basic_parameters": {"data_path": "a", "repeat_time": 1.5}}, "repeat_time is 1.5, neither a share"),
        ({"basic_parameters": {"data_folder": "a"}}, "names no data_path. Name the file"),
        ({"dataset_type": "lumina"}, "dataset_type 'lumina' is for rows of tokens"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    assert said in refusal(PICTURES, **changes)


def test_turns_that_list_their_pictures() -> None:
    sets = {"data_path": "rows.jsonl", "data_folder": "media", "repeat_time": 1}
    param = {"dataset_type": "deepseekvl2", "basic_parameters": sets, "preprocess_parameters": None}
    data = read(param, processor_path="folder").arguments.data.dataset_param
    assert (data.basic_parameters.dataset, data.basic_parameters.dataset_dir) == ("rows.jsonl", "media")
    assert data.preprocess_parameters.model_name_or_path == "folder"


def test_transcripts() -> None:
    spoken = {"processor_name_or_path": "whisper", "language": "Hindi", "task": "transcribe"}
    basic = {"dataset_name_or_path": "common_voice", "language": "hi"}
    translated = read({"dataset_type": "audio", "basic_parameters": basic, "preprocess_parameters": spoken})
    data = translated.arguments.data.dataset_param
    assert (data.basic_parameters.dataset, data.preprocess_parameters.model_name_or_path) == ("common_voice", "whisper")
    assert "language Hindi, task transcribe: transcripts begin as generation_config.json" in "".join(translated.notes)


def test_a_picture_has_as_many_tiles_as_the_file_says() -> None:
    """A picture of 4:1 is cut into 2 tiles, as many as are allowed, and a view of the whole follows: 3 × 4 tokens."""
    make_tiny_internvl_chat(Path("model"))  # whose own bound is 4 tiles
    Path("media").mkdir()
    Image.new("RGB", (64, 16)).save("media/a.png")
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
    Path("rows.jsonl").write_text(json.dumps({"image": "a.png", "conversations": turns}) + "\n")
    views = {}
    for most in (2, 4):
        param = read(PICTURES, max_dynamic_patch=most).arguments.data.dataset_param
        dataset = build_mm_dataset(param)[0]
        token = dataset.processor.tokenizer.convert_tokens_to_ids(SPECIAL["context"])
        views[most] = int((dataset[0]["input_ids"] == token).sum()) / 4
    assert views == {2: 3, 4: 5}
