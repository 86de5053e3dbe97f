from __future__ import annotations

from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.convert import convert_row, convert_text
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem, Place, Sample
from mindspeed_mm.fsdp.data.data_utils.sources import RowFormat
from mindspeed_mm.fsdp.params.data_args import DatasetAttr

PLACE = Place("rows.jsonl", 7)
IMAGE = {"type": "image"}


def convert(row: dict[str, Any], **attr: Any) -> Sample:
    return convert_row(row, RowFormat.from_attr(DatasetAttr.model_validate(attr)), PLACE)


def text(part: str) -> dict[str, str]:
    return {"type": "text", "text": part}


def turns(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


SHARED = turns([IMAGE, text("\nWhich?")], "seven", "sure?", "yes")


@pytest.mark.parametrize(
    ("row", "attr"),
    [
        (
            {
                "conversations": [
                    {"from": "human", "value": "<image>\nWhich?"},
                    {"from": "gpt", "value": "seven"},
                    {"from": "human", "value": "sure?"},
                    {"from": "gpt", "value": "yes"},
                ],
                "image": "a.png",
                "id": "llava-1",
            },
            {},
        ),
        ({"messages": turns("<image>\nWhich?", "seven", "sure?", "yes"), "images": ["a.png"]}, {}),
        (
            {
                "chat": [
                    {"who": "U", "says": "<image>\nWhich?"},
                    {"who": "M", "says": "seven"},
                    {"who": "U", "says": "sure?"},
                    {"who": "M", "says": "yes"},
                ],
                "pics": ["a.png"],
            },
            {
                "messages": "chat",
                "images": "pics",
                "role_tag": "who",
                "content_tag": "says",
                "user_tag": "U",
                "assistant_tag": "M",
            },
        ),
        (
            {
                "instruction": "sure?",
                "input": "",
                "output": "yes",
                "history": [["<image>\nWhich?", "seven"]],
                "images": "a.png",
            },
            {"formatting": "alpaca"},
        ),
    ],
    ids=["llava", "mllm", "named columns", "alpaca"],
)
def test_every_format_gives_the_same_sample(row: dict[str, Any], attr: dict[str, Any]) -> None:
    sample = convert(row, **attr)
    assert sample.messages == SHARED
    assert sample.weights == [0, 1, 0, 1]
    assert sample.media == [MediaItem("image", "a.png")]


def test_system_prompts_placeholders_and_alpaca_inputs() -> None:
    row = {"system": "Be brief.", "messages": turns("<image> or <image>?<image>", "no"), "images": ["a", "b", "c"]}
    sample = convert(row)
    assert sample.messages[0] == {"role": "system", "content": "Be brief."}
    assert sample.messages[1]["content"] == [IMAGE, text(" or "), IMAGE, text("?"), IMAGE]
    alpaca = convert({"instruction": "Add", "input": "1 2", "output": "3"}, formatting="alpaca")
    assert alpaca.messages == turns("Add\n1 2", "3")


def test_a_turn_may_be_left_untrained() -> None:
    row = {"messages": turns("a", "b", "c", "d", "e", "f")}
    row["messages"][1]["train"] = False
    row["messages"][3]["weight"] = 0
    row["messages"][5]["weight"] = 1
    assert convert(row).weights == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("row", "field", "message"),
    [
        ({"text": "x"}, "conversations", "the field is missing; the row has ['text']"),
        ({"messages": "hello"}, "messages", "'hello' is not a list of messages"),
        ({"messages": turns("hi", 5)}, "message 1.content", "5 is not text"),
        ({"messages": turns("hi", None)}, "message 1.content", "None is not text"),
        ({"messages": ["hi"]}, "message 0", "'hi' is no message"),
        ({"messages": [{"speaker": "x"}]}, "message 0", "has the fields ['speaker']"),
        ({"messages": []}, "messages", "no trainable token"),
        ({"messages": turns("hi")}, "messages", "no trainable token"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "message 0", "unknown role 'narrator'"),
        ({"messages": [*turns("a", "b"), *turns("c", "d"), *turns("e")]}, "messages", "nothing answers it"),
        ({"messages": [turns("a")[0], *turns("a", "b")]}, "messages", "the user's where the assistant's is due"),
        ({"messages": turns("<image>", "x")}, "images", "1 <image> placeholders in the text, but 0 images"),
        ({"messages": turns("a", "b"), "images": ["x.png"]}, "images", "0 <image> placeholders in the text, but 1"),
        ({"messages": turns("<video>", "x")}, "videos", "1 <video> placeholders in the text, but 0 videos"),
        ({"messages": turns("<image>", "x"), "images": [3]}, "images", "[3] is not a list of media"),
        ({"messages": [*turns("a"), {"role": "assistant", "content": "b", "weight": 0.5}]}, "weight", "0.5"),
    ],
)
def test_a_wrong_row_names_row_field_and_value(row: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        convert(row)
    (problem,) = caught.value.problems
    assert problem.where == "rows.jsonl:7"
    assert field in problem.key
    assert message in problem.what


@pytest.mark.parametrize(
    ("row", "attr", "key"),
    [
        ({"messages": turns("a", "b")}, {"formatting": "openai"}, "formatting"),
        ({"messages": turns("a", [text("b")])}, {}, "formatting"),
        ({"messages": turns("<video>", "b"), "videos": ["v.mp4"]}, {}, "videos"),
        ({"messages": [*turns("a", "b"), {"role": "tool", "content": "x"}]}, {}, "message 2"),
        ({"messages": turns("a", "b")}, {"ranking": True}, "ranking"),
    ],
)
def test_what_is_not_built_yet_says_so(row: dict[str, Any], attr: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match="not built yet") as caught:
        convert(row, **attr)
    assert key in caught.value.problems[0].key


def test_text_rows() -> None:
    assert convert_text({"text": "once upon a time"}, PLACE).text == "once upon a time"
    for row in ({}, {"text": None}, {"text": "  "}):
        with pytest.raises(DataError, match="text"):
            convert_text(row, PLACE)
