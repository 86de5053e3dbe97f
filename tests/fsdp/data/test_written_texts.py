"""Pictures next to each other, next to words and in several turns give the tokens of the processor's own call, in every
family whose processor can be built here; one that writes otherwise and cannot be asked is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from PIL import Image

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import build_mm_plugin
from mindspeed_mm.fsdp.data.data_utils.rendering.placement import TextWriter
from mindspeed_mm.fsdp.params.data_args import DatasetParam, PreprocessParameters
from tests.fsdp.data.conftest import picture
from tests.helpers.released_rows import ROWS, WrittenRow
from tests.helpers.tiny_more_processors import MORE
from tests.helpers.tiny_processors import FAMILIES, byte_tokenizer

_TEMPLATE = (
    "{%- for message in messages -%}{{- message.role.capitalize() + ':' -}}"
    "{%- if message.content is string %}{{ message.content }}{% else -%}"
    "{%- for part in message.content -%}{{- '<image>' if part.type == 'image' else part.text -}}{%- endfor -%}"
    "{%- endif -%}{{- '<end_of_utterance>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif -%}"
)
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_SIDES = {"shortest_edge": 28, "longest_edge": 70}


def idefics2(split: bool = False) -> Any:
    """Neighbouring pictures share a border, and a space stands between a picture and a word."""
    images = transformers.Idefics2ImageProcessor(size=_SIDES, do_image_splitting=split)
    tokenizer = byte_tokenizer(_SPECIAL, _TEMPLATE)
    return transformers.Idefics2Processor(images, tokenizer, image_seq_len=6, chat_template=_TEMPLATE)


def _saved(build: Callable[[], Any]) -> Callable[[Path], object]:
    return lambda folder: build().save_pretrained(folder)


def _writers() -> dict[str, Callable[[Path], object]]:
    """Family → writes its processor into a folder."""
    found: dict[str, Callable[[Path], object]] = {}
    for name, row in ROWS.items():
        if isinstance(row, WrittenRow):
            found[name] = row.write
        elif "image" in row.kinds:
            found[name] = _saved(row.processor)
    for name, family in (FAMILIES | MORE).items():
        if "image" in family.kinds:
            found.setdefault(name, _saved(family.build))
    return found | {"idefics2": _saved(idefics2), "idefics2_split": _saved(lambda: idefics2(split=True))}


WRITERS = _writers()
DEFAULT = ("idefics2", "idefics2_split", "gemma3", "internvl", "qwen3vl")
"""Of the default run; the others are slow ones."""
ENDS = {"glm4v": "<|user|>", "glm4v_moe": "<|user|>"}
"""As in `tests/families/test_released_data.py`."""
CHATS = (
    ("<image>What?", "It."),
    ("a<image>b", "Yes."),
    ("Describe <image>", "It."),
    ("a<image><image>b<image>", "Three."),
    ("<image>\n<image>c <image>", "x", "So <image> and <image>(d)", "y", "no more", "z"),
    ("<image>", "Only it.", "<image><image>é", "Both."),
)
SIZES = [(48, 32), (32, 64), (100, 37), (56, 56), (30, 90)]


def _rows(folder: Path, chats: tuple[tuple[str, ...], ...] = CHATS) -> Path:
    """Each chat as a row, with pictures of uneven sizes beside it."""
    folder.mkdir()
    for number, size in enumerate(SIZES):
        picture(*size, seed=number).save(folder / f"{number}.png")
    lines = []
    for chat in chats:
        turns = [{"role": ("user", "assistant")[at % 2], "content": words} for at, words in enumerate(chat)]
        count = sum(words.count("<image>") for words in chat)
        lines.append(json.dumps({"messages": turns, "images": [f"{number}.png" for number in range(count)]}))
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _dataset(model: Path, rows: Path) -> Any:
    basic = {"dataset": str(rows), "dataset_dir": str(rows.parent), "cutoff_len": 16384}
    preprocess = {"model_name_or_path": str(model)}
    param = DatasetParam.model_validate({"basic_parameters": basic, "preprocess_parameters": preprocess})
    return build_mm_dataset(param)[0]


def _by_processor(name: str, processor: Any, row: dict[str, Any], folder: Path) -> list[int]:
    """By nothing but transformers."""
    images = [Image.open(folder / file).convert("RGB") for file in row["images"]]
    turns = []
    for turn in row["messages"]:
        parts: list[dict[str, str]] = []
        for piece in filter(None, re.split("(<image>)", turn["content"])):
            parts.append({"type": "image"} if piece == "<image>" else {"type": "text", "text": piece})
        turns.append({"role": turn["role"], "content": parts})
    template = processor.chat_template or processor.tokenizer.chat_template
    rendered = processor.apply_chat_template(turns, chat_template=template, tokenize=False)
    if end := ENDS.get(name):
        rendered = rendered.rstrip() + end
    bos = processor.tokenizer.bos_token
    options = {"add_special_tokens": not (bos and rendered.startswith(bos))}
    told = ROWS[name].processing if name in ROWS else {}
    given = images if name == "deepseek_vl2" else [images]  # which takes no list for each text
    made = processor(text=[rendered], images=given, return_tensors="pt", text_kwargs=options, **told)
    ids: list[int] = made["input_ids"][0].tolist()
    return ids


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in WRITERS]
)
def test_rows_have_the_tokens_of_the_processors_own_call(name: str, tmp_path: Path) -> None:
    model, path = tmp_path / "model", _rows(tmp_path / "rows")
    WRITERS[name](model)
    dataset = _dataset(model, path)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        expected = _by_processor(name, dataset.processor, json.loads(line), path.parent)
        assert dataset[number]["input_ids"].tolist() == expected, CHATS[number]


def test_what_is_trained_and_where_pictures_stand_moves_with_what_the_processor_writes(tmp_path: Path) -> None:
    idefics2().save_pretrained(tmp_path / "model")
    dataset = _dataset(tmp_path / "model", _rows(tmp_path / "rows"))
    tokenizer = dataset.processor.tokenizer
    for number, chat in enumerate(CHATS):
        encoded = dataset[number]
        trained = tokenizer.decode(encoded["input_ids"][encoded["labels"] != -100])
        assert trained == "".join(f"{answer}<end_of_utterance>" for answer in chat[1::2])
        outline = dataset._encoder.outline(dataset.sample(number))
        assert outline.input_ids.tolist() == encoded["input_ids"].tolist()
        pieces = [tokenizer.decode(outline.input_ids[first:last]) for first, last in outline.media_spans]
        assert "".join(chat).count("<image>") == len(pieces)
        assert {piece.replace("<fake_token_around_image>", "") for piece in pieces} == {"<image>" * 6}


def test_words_that_look_like_placeholders_stay_words(tmp_path: Path) -> None:
    idefics2().save_pretrained(tmp_path / "model")
    chat = ("<image>b", "Here: <image> and <fake_token_around_image> <end_of_utterance>.", "again", "no")
    path = _rows(tmp_path / "rows", (chat,))
    row = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(row | {"images": ["0.png"]}) + "\n", encoding="utf-8")
    dataset = _dataset(tmp_path / "model", path)
    ids, tokenizer = dataset[0]["input_ids"].tolist(), dataset.processor.tokenizer
    expected = "User:" + "<fake_token_around_image>" + "<image>" * 6 + "<fake_token_around_image> b"
    assert tokenizer.decode(ids).startswith(expected) and tokenizer.decode(ids).count("<image>") == 7
    assert ids.count(tokenizer.convert_tokens_to_ids("<image>")) == 6
    assert ids.count(tokenizer.convert_tokens_to_ids("<fake_token_around_image>")) == 2


class CountsPictures(transformers.Idefics2Processor):
    """Writes for neighbours what only their pictures tell: without them it writes no picture at all."""

    def __call__(self, images: Any = None, text: Any = None, **options: Any) -> Any:
        if images is None:
            return self.tokenizer(text)
        return super().__call__(images=images, text=text, **options)


def test_a_processor_that_cannot_be_asked_without_its_pictures_is_refused() -> None:
    processor = idefics2()
    processor.__class__ = CountsPictures
    plugin = build_mm_plugin(processor, PreprocessParameters())
    with pytest.raises(ConfigError, match=r"CountsPictures .* writes others among words than alone"):
        plugin.encode_image(picture(40, 30))


class ChangesWords(transformers.Idefics2Processor):
    def __call__(self, images: Any = None, text: Any = None, **options: Any) -> Any:
        return super().__call__(images=images, text=[one.replace("sea", "lake") for one in text], **options)


def test_a_processor_that_changes_the_words_of_a_row_is_refused_at_that_row() -> None:
    processor = idefics2()
    processor.__class__ = ChangesWords
    writer = TextWriter(processor, "<image>")
    assert [item.behind for item in writer.items("in <image>the<image> hills<image>")] == [" ", "", ""]
    with pytest.raises(DataError, match="changes more of the text than its pictures"):
        writer.items("in <image>the sea")
