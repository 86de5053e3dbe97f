"""Folders as other tools write them, named by a YAML beside them: the same conversation gives the same tokens and media
whatever its format, and those that transformers' own `apply_chat_template` gives.
"""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from mindspeed_mm.core.batch import IGNORED_LABEL
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.convert import CONVERTERS, convert_row
from mindspeed_mm.fsdp.data.data_utils.prompts import with_answer
from mindspeed_mm.fsdp.data.data_utils.rows.formats import FORMAT_WORDS, SHAPES, RowFormat
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import find_part
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.utils.processor import load_processor
from tests.fsdp.data.conftest import picture, write_jsonl
from tests.helpers.tiny_media import wav_bytes, write_video
from tests.helpers.tiny_processors import save_processor

QUESTION, ANSWER, THANKS, BYE = "Which digit is this?", "A seven.", "Thanks!", "Any time."
TEXTS = (QUESTION, ANSWER, THANKS, BYE)
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a + b", "parameters": {"type": "object"}}}]
THOUGHT, ARGUMENTS, RESULT = "I had better ask.", {"a": 1, "b": [2, "é"]}, "3"
TOOL_CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 2?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": THOUGHT,
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "content": RESULT},
    {"role": "tool", "content": "or so"},
    {"role": "assistant", "content": "three"},
]
CALL = json.dumps({"name": "add", "arguments": ARGUMENTS}, ensure_ascii=False)


def turns(*texts: str, names: tuple[str, str, str, str] = ("role", "content", "user", "assistant")) -> list[Any]:
    role, content, *speakers = names
    return [{role: speakers[i % 2], content: text} for i, text in enumerate(texts)]


SHAREGPT = ("from", "value", "human", "gpt")
ASKED = (f"<image>{QUESTION}", *TEXTS[1:])


def data_url(folder: Path) -> str:
    return "data:image/png;base64," + base64.b64encode((folder / "a.png").read_bytes()).decode()


def parts(folder: Path, *medium: dict[str, Any]) -> list[Any]:
    chat = turns(*TEXTS)
    chat[0]["content"] = [*medium, {"type": "text", "text": QUESTION}]
    return chat


def write_parquet(path: Path, rows: list[Any]) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)


def llava(folder: Path) -> dict[str, Any]:
    row = {"id": "000", "image": "a.png", "conversations": turns(*ASKED, names=SHAREGPT)}
    (folder / "llava.json").write_text(json.dumps([row], indent=2))
    return {"dataset": "llava.json"}


def sharegpt(folder: Path) -> dict[str, Any]:
    write_jsonl(folder / "s.jsonl", [{"images": ["a.png"], "dialogue": turns(*ASKED, names=SHAREGPT)}])
    return {"dataset": "s.jsonl", "attr": {"messages": "dialogue", "images": "images"}}


def mllm(folder: Path) -> dict[str, Any]:
    write_jsonl(folder / "m.jsonl", [{"messages": turns(*ASKED), "images": ["a.png"], "videos": [], "audios": []}])
    return {"dataset": "m.jsonl"}


def openai(folder: Path) -> dict[str, Any]:
    chat = parts(folder, {"type": "image_url", "image_url": {"url": data_url(folder)}})
    write_jsonl(folder / "o.jsonl", [{"messages": chat}])
    return {"dataset": "o.jsonl", "attr": {"formatting": "openai"}, "allow_remote_media": True}


def openai_bytes(folder: Path) -> dict[str, Any]:
    chat = parts(folder, {"type": "image", "base64": data_url(folder).rpartition(",")[2]})
    write_jsonl(folder / "o.jsonl", [{"messages": chat}])
    return {"dataset": "o.jsonl", "attr": {"formatting": "openai"}}


def hugging_face(folder: Path) -> dict[str, Any]:
    (folder / "hub").mkdir()
    image = {"bytes": (folder / "a.png").read_bytes(), "path": "a.png"}
    chat = [{"role": turn["role"], "content": turn["content"]} for turn in turns(*TEXTS)]
    for turn in chat:
        turn["content"] = [{"type": "text", "text": turn["content"]}]
    chat[0]["content"].insert(0, {"type": "image", "text": None})
    write_parquet(folder / "hub" / "train-00000-of-00001.parquet", [{"messages": chat, "images": [image]}])
    return {"dataset": "hub"}


def alpaca_csv(folder: Path) -> dict[str, Any]:
    with (folder / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["instruction", "input", "output", "image"], [ASKED[0], "", ANSWER, "a.png"]])
    return {"dataset": "a.csv", "attr": {"formatting": "alpaca"}}


def llama_factory(folder: Path) -> dict[str, Any]:
    row = {"instruction": THANKS, "output": BYE, "history": [list(ASKED[:2])], "images": ["a.png"]}
    (folder / "mine.json").write_text(json.dumps([row]))
    columns = {"prompt": "instruction", "response": "output", "history": "history", "images": "images"}
    (folder / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "mine.json", "columns": columns}}))
    return {"dataset": "mine"}


def several(folder: Path) -> dict[str, Any]:
    llama_factory(folder)
    write_jsonl(folder / "s.jsonl", [{"dialogue": turns(*ASKED, names=SHAREGPT), "images": ["a.png"]}])
    section = {"path": "s.jsonl", "name": "mine too", "attr": {"messages": "dialogue"}}
    return {"dataset": [section, "mine"]}


FOLDERS = [llava, sharegpt, mllm, openai, openai_bytes, hugging_face, alpaca_csv, llama_factory, several]

Open = Callable[..., Any]


@pytest.fixture
def open_folder(tmp_path: Path) -> Open:
    """The data set of a YAML in a folder that is not the working directory."""

    def make(written: dict[str, Any], model: Path) -> Any:
        basic = {"dataset_dir": str(tmp_path), "cache_dir": str(tmp_path / "cache"), "cutoff_len": 8192, **written}
        dataset = {
            "attr": basic.pop("attr", {}),
            "basic_parameters": basic,
            "preprocess_parameters": {"model_name_or_path": str(model)},
        }
        # JSON is YAML
        (tmp_path / "run.yaml").write_text(json.dumps({"data": {"dataset_param": dataset}, "training": {}}))
        return build_mm_dataset(load_config(tmp_path / "run.yaml").arguments.data.dataset_param)[0]

    return make


@pytest.mark.parametrize("write", FOLDERS)
def test_the_same_conversation_in_every_format(
    write: Callable[[Path], dict[str, Any]], tmp_path: Path, open_folder: Open, vlm_folder: Path
) -> None:
    picture(48, 32, seed=1).save(tmp_path / "a.png")
    processor = load_processor(vlm_folder)
    said = TEXTS[:2] if write is alpaca_csv else TEXTS
    chat = parts(tmp_path, {"type": "image", "image": picture(48, 32, seed=1)})[: len(said)]
    for turn in chat[1:]:
        turn["content"] = [{"type": "text", "text": turn["content"]}]
    expected = processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="np")
    dataset = open_folder(write(tmp_path), vlm_folder)
    for index in range(len(dataset)):
        sample = dataset[index]
        assert sample["input_ids"].tolist() == expected["input_ids"][0].tolist()
        pixels = dataset.plugin.collate(sample["media"])["pixel_values"].numpy()
        assert np.array_equal(pixels, np.asarray(expected["pixel_values"]))
        trained = sample["input_ids"][sample["labels"] != IGNORED_LABEL]
        assert processor.decode(trained) == "".join(f"{text}<|im_end|>" for text in said[1::2])


def tools_of_sharegpt(folder: Path) -> dict[str, Any]:
    speakers = ("system", "human", "function_call", "observation", "observation", "gpt")
    texts = ("Be brief.", "1 + 2?", f"<think>\n{THOUGHT}\n</think>\n\n{CALL}", RESULT, "or so", "three")
    chat = [{"from": who, "value": text} for who, text in zip(speakers, texts, strict=True)]
    row = {"conversations": chat, "tools": json.dumps([TOOLS[0]["function"]])}
    write_jsonl(folder / "t.jsonl", [row])
    return {"dataset": "t.jsonl", "attr": {"formatting": "multimodal_tool"}, "tool_format": "qwen"}


def tools_of_openai(folder: Path) -> dict[str, Any]:
    chat = json.loads(json.dumps(TOOL_CHAT))
    call = chat[2]["tool_calls"][0]
    call["id"], call["function"]["arguments"] = "c1", json.dumps(ARGUMENTS)
    chat[2]["content"] = None
    chat[3]["tool_call_id"] = "c1"
    write_jsonl(folder / "t.jsonl", [{"messages": chat, "tools": TOOLS}])
    return {"dataset": "t.jsonl", "attr": {"formatting": "openai"}}


def tools_of_parquet(folder: Path) -> dict[str, Any]:
    """Every message has all keys of all messages, and tools are text."""
    chat = json.loads(json.dumps(TOOL_CHAT))
    chat[2]["tool_calls"][0]["function"]["arguments"] = json.dumps(ARGUMENTS)
    keys = {key for turn in chat for key in turn}
    write_parquet(
        folder / "t.parquet",
        [{"messages": [{key: turn.get(key) for key in keys} for turn in chat], "tools": json.dumps(TOOLS)}],
    )
    return {"dataset": "t.parquet"}


@pytest.mark.parametrize("write", [tools_of_sharegpt, tools_of_openai, tools_of_parquet])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "glm4v"])
def test_the_same_tools_in_every_format(
    family: str, write: Callable[[Path], dict[str, Any]], tmp_path: Path, open_folder: Open
) -> None:
    model = save_processor(family, tmp_path / "model")
    processor = load_processor(model)
    chat: list[Any] = json.loads(json.dumps(TOOL_CHAT))
    if family != "qwen3":  # a processor wants parts
        for turn in chat:
            turn["content"] = [{"type": "text", "text": turn["content"]}] if turn["content"] else []
    text = processor.apply_chat_template(chat, tools=TOOLS, tokenize=False, enable_thinking=True)
    text += "<|user|>" if family == "glm4v" else ""  # its template writes no end of a turn
    tokenizer = getattr(processor, "tokenizer", processor)
    sample = open_folder(write(tmp_path), model)[0]
    assert tokenizer.decode(sample["input_ids"]) == text
    assert sample["input_ids"].tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    trained = tokenizer.decode(sample["input_ids"][sample["labels"] != IGNORED_LABEL])
    for word in ("add", "three"):
        assert word in trained
    for word in ("or so", "1 + 2?", "Be brief", "a + b"):
        assert word not in trained


def test_videos_as_files_or_frames_and_sounds(tmp_path: Path, open_folder: Open) -> None:
    model = save_processor("qwen3_omni", tmp_path / "model")
    picture(48, 32, seed=1).save(tmp_path / "a.png")
    write_video(tmp_path / "v.mp4", [10, 60, 110, 160], fps=2)
    frames = []
    for number, level in enumerate((10, 60, 110, 160)):
        picture(64, 64, seed=level).save(tmp_path / f"{number}.png")
        frames.append(f"{number}.png")
    content = [
        {"type": "video", "video": frames},
        {"type": "image", "path": "a.png"},
        {"type": "text", "text": "What?"},
    ]
    rows = [
        {"messages": turns("<video><image>What?", "That."), "videos": [frames], "images": ["a.png"]},
        {"messages": [{"role": "user", "content": content}, turns("", "That.")[1]]},
        {"messages": turns("<video>What?<audio>", "That."), "video": "v.mp4", "audios": ["s.wav"]},
    ]
    (tmp_path / "s.wav").write_bytes(wav_bytes())
    write_jsonl(tmp_path / "v.jsonl", rows)
    dataset = open_folder({"dataset": "v.jsonl"}, model)
    samples = [dataset[i] for i in range(3)]
    assert [[item.kind for item in sample["media"]] for sample in samples] == [["video", "image"]] * 2 + [
        ["video", "audio"]
    ]
    assert samples[0]["input_ids"].tolist() == samples[1]["input_ids"].tolist()


def test_entries_stand_beside_the_yaml(tmp_path: Path, open_folder: Open, text_folder: Path) -> None:
    for name in ("s.jsonl", "t.jsonl"):
        write_jsonl(tmp_path / name, [{"messages": turns("a", name)}])
    dataset = open_folder({"dataset": [{"path": "s.jsonl"}, "t.jsonl"], "dataset_dir": "elsewhere"}, text_folder)
    assert [find_part(dataset.parts, name) for name in ("s.jsonl", "t.jsonl")] == [0, 1]


def test_a_section_of_an_entry_is_checked_like_any_other(tmp_path: Path, open_folder: Open, text_folder: Path) -> None:
    write_jsonl(tmp_path / "s.jsonl", [{"messages": turns("a", "b")}])
    for entry, words in (
        ({"path": "s.jsonl", "atr": {}}, ("atr", "attr")),
        ({"path": "s.jsonl", "attr": {"mesages": "x"}}, ("mesages", "messages")),
        ({"name": "x"}, ("path",)),
        ({"path": "s.jsonl", "max_samples": 0}, ("max_samples",)),
        (3, ("3",)),
    ):
        with pytest.raises(ConfigError) as caught:
            open_folder({"dataset": [entry]}, text_folder)
        for word in ("basic_parameters.dataset", *words):
            assert word in str(caught.value)


def test_the_words_of_attr_are_those_of_the_table() -> None:
    named = DatasetParam.model_fields["attr"].annotation.model_fields["formatting"].annotation
    assert set(FORMAT_WORDS) == set(get_args(named))
    assert {shape.formatting for shape in SHAPES.values()} == set(CONVERTERS)


@pytest.mark.parametrize("name", SHAPES)
def test_every_format_is_read_trained_and_asked_alike(name: str) -> None:
    """One table says which columns a format has: what converts rows and what fills in answers reads it."""
    if name == "document":
        return
    place, key = RowLocation("rows", 1), next(iter(SHAPES[name].needed))
    for column in SHAPES[name].needed[key]:
        row: dict[str, Any] = {column: [{"role": "user", "content": QUESTION}] if key == "messages" else QUESTION}
        answered, layout = with_answer(row, RowFormat(), place)
        sample = convert_row(answered, layout, place)
        assert [message["role"] for message in sample.messages] == ["user", "assistant"]
        said = sample.messages[0]["content"]
        assert said == QUESTION if name != "transcript" else said[0]["type"] == "audio", said
        assert sample.messages[1]["content"] == ""
