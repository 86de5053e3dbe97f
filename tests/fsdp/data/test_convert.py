"""Every row format gives the same sample; what the row says wrongly is named."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.convert import DRAWN_UNASKED, convert_row, convert_text
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem, RowLocation, Sample
from mindspeed_mm.fsdp.params.data_args import DatasetAttr

PLACE = RowLocation("rows.jsonl", 7)
IMAGE = {"type": "image"}
PICTURE = MediaItem("image", "a.png")


def convert(row: dict[str, Any], **attr: Any) -> Sample:
    return convert_row(row, RowFormat.from_attr(DatasetAttr.model_validate(attr)), PLACE)


def text(part: str) -> dict[str, str]:
    return {"type": "text", "text": part}


def turns(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def sharegpt(*contents: Any) -> list[dict[str, Any]]:
    return [{"from": ("human", "gpt")[i % 2], "value": c} for i, c in enumerate(contents)]


SPOKEN = ("<image>\nWhich?", "seven", "sure?", "yes")
SHARED = turns([IMAGE, text("\nWhich?")], *SPOKEN[1:])
DATA_URL = "data:image/png;base64,iVBO"
PARTS = [{"type": "image_url", "image_url": {"url": "a.png"}}, text("\nWhich?")]


@pytest.mark.parametrize(
    ("row", "attr"),
    [
        ({"conversations": sharegpt(*SPOKEN), "image": "a.png", "id": "llava-1"}, {}),
        ({"messages": turns(*SPOKEN), "images": ["a.png"]}, {}),
        ({"messages": turns(*SPOKEN), "images": [{"path": "a.png", "bytes": None}]}, {"formatting": "openai"}),
        (
            {
                "chat": [{"who": "UM"[i % 2], "says": spoken} for i, spoken in enumerate(SPOKEN)],
                "pics": ["a.png"],
                "images": ["another column.png"],
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
        (
            {"instruction": "sure?", "q": "", "a": "yes", "past": [["<image>\nWhich?", "seven"]], "images": "a.png"},
            {"formatting": "alpaca", "query": "q", "response": "a", "history": "past"},
        ),
        ({"messages": turns(PARTS, *SPOKEN[1:])}, {"formatting": "openai"}),
        ({"messages": turns(PARTS, [text("sev"), text("en")], "sure?", [text("yes")])}, {}),
        ({"messages": turns([IMAGE, text("\nWhich?")], *SPOKEN[1:]), "images": ["a.png"]}, {"formatting": "openai"}),
        (
            {"messages": turns([IMAGE | {"image": "a.png", "text": None}, text("\nWhich?")], *SPOKEN[1:])},
            {"formatting": "multimodal_tool"},
        ),
    ],
    ids=["llava", "mllm", "openai", "named", "alpaca", "alpaca named", "parts", "text parts", "column", "parquet"],
)
def test_every_format_gives_the_same_sample(row: dict[str, Any], attr: dict[str, Any]) -> None:
    sample = convert(row, **attr)
    assert sample == Sample(PLACE, SHARED, [None, 1, None, 1], [PICTURE])


@pytest.mark.parametrize(
    ("part", "item"),
    [
        ({"type": "image", "image": "a.png"}, ("image", "a.png")),
        ({"type": "image", "path": "a.png"}, ("image", "a.png")),
        ({"type": "image", "url": "a.png"}, ("image", "a.png")),
        ({"type": "image", "base64": "iVBO"}, ("image", {"bytes": "iVBO"})),
        ({"type": "image", "image": {"bytes": b"\x89PNG", "path": None}}, ("image", {"bytes": b"\x89PNG"})),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}, ("image", {"bytes": DATA_URL})),
        ({"type": "image_url", "image_url": "http://host/a.png"}, ("image", "http://host/a.png")),
        ({"type": "video", "video": "v.mp4", "fps": 2}, ("video", {"path": "v.mp4", "options": {"fps": 2}})),
        ({"type": "video", "video": ["1.png", {"path": "2.png"}]}, ("video", ["1.png", "2.png"])),
        ({"type": "video_url", "video_url": {"url": "v.mp4"}}, ("video", "v.mp4")),
        ({"type": "audio", "audio": b"RIFF"}, ("audio", b"RIFF")),
        ({"type": "audio_url", "audio_url": {"url": "a.wav"}}, ("audio", "a.wav")),
        ({"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}, ("audio", {"bytes": "UklG"})),
    ],
)  # fmt: skip
def test_parts_bring_their_media(part: dict[str, Any], item: tuple[str, Any]) -> None:
    sample = convert({"messages": turns(["Look: ", part], "fine")})
    assert sample.messages[0]["content"] == [text("Look: "), {"type": item[0]}]
    assert sample.media == [item]


def test_media_of_three_kinds_stand_in_order_of_appearance() -> None:
    row = {
        "messages": turns("<audio>a<video>b<image>", "1", [{"type": "image", "path": "own.png"}, IMAGE], "2<image>"),
        "images": ["1.png", b"2", "3.png"],
        "videos": [["f1.png", "f2.png"]],
        "audio": "s.wav",
    }
    sample = convert(row)
    assert sample.media == [
        ("audio", "s.wav"),
        ("video", ["f1.png", "f2.png"]),
        ("image", "1.png"),
        ("image", "own.png"),
        ("image", b"2"),
        ("image", "3.png"),
    ]
    assert sample.messages[0]["content"] == [{"type": "audio"}, text("a"), {"type": "video"}, text("b"), IMAGE]
    assert sample.messages[2]["content"] == [IMAGE, IMAGE]
    assert convert({"messages": turns("no picture", "no"), "image": ""}).media == []


def test_text_parts_are_literal_and_placeholders_only_of_strings() -> None:
    sample = convert({"messages": turns([text("the <image> tag"), text("?")], "yes")})
    assert sample == Sample(PLACE, turns("the <image> tag?", "yes"), [None, 1])


def test_system_prompts_and_alpaca_inputs() -> None:
    for extra in ({"system": "Be brief."}, {}):
        row = {"messages": turns("a", "b"), **extra}
        if not extra:
            row["messages"].insert(0, {"role": "developer", "content": "Be brief."})
        assert convert(row).messages[0] == {"role": "system", "content": "Be brief."}
    assert convert({"how": "Be.", "messages": turns("a", "b")}, system="how").messages[0]["content"] == "Be."
    alpaca = convert({"instruction": "Add", "input": "1 2", "output": "3", "system": "Be."}, formatting="alpaca")
    assert alpaca.messages == [{"role": "system", "content": "Be."}, *turns("Add\n1 2", "3")]


@pytest.mark.parametrize(
    ("fields", "weight"),
    [
        ({"train": False}, 0),
        ({"trainable": False}, 0),
        ({"weight": 0}, 0),
        ({"mask": True}, 0),
        ({"mask": 0, "train": 1, "weight": 1}, 1),
        ({"weight": 0.25}, 0.25),
        ({"weight": 3}, 3),
        ({"weight": 3, "train": False}, 0),
        ({"weight": None, "train": None}, 1),
    ],
)
def test_a_turn_may_count_more_or_less(fields: dict[str, Any], weight: float) -> None:
    row = {"messages": turns("a", "b", "c", "d")}
    row["messages"][1] |= fields
    row["messages"][2] |= fields  # the user's turns count where prompts are trained too
    assert convert(row).weights == [None, weight, None if weight == 1 else weight, 1]


# --- tools -----------------------------------------------------------------------------------------------------------

FUNCTION = {"name": "add", "description": "a + b", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
ARGUMENTS = json.dumps(CALL["function"]["arguments"])
LONG_CALL = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SOLVED = [
    turns("1 + 2?")[0],
    {**LONG_CALL, "reasoning_content": "I had better ask."},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "three"},
]


@pytest.mark.parametrize(
    "spelled",
    [
        f'{{"name": "add", "arguments": {ARGUMENTS}}}',
        f'[{{"name": "add", "arguments": {ARGUMENTS}}}]',
        json.dumps([{"name": "add", "arguments": ARGUMENTS}]),
        f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>',
        {"name": "add", "arguments": {"a": 1, "b": [2], "of another row": None}},
    ],
)
@pytest.mark.parametrize("formatting", ["sharegpt", "multimodal_tool", "openai"])
def test_tool_turns_of_sharegpt(spelled: Any, formatting: str) -> None:
    if isinstance(spelled, str):
        spelled = f"<think>\nI had better ask.\n</think>\n\n{spelled}"
        expected = SOLVED
    else:
        expected = [SOLVED[0], LONG_CALL, *SOLVED[2:]]
    said = [("human", "1 + 2?"), ("function_call", spelled), ("observation", "3"), ("gpt", "three")]
    row = {"conversations": [{"from": role, "value": value} for role, value in said], "tools": json.dumps([FUNCTION])}
    sample = convert(row, formatting=formatting)
    assert sample.messages == expected
    assert sample.weights == [None, 1, None, 1]
    assert sample.tools == [{"type": "function", "function": FUNCTION}]


def test_tool_turns_under_names_of_their_own() -> None:
    said = [("U", "1 + 2?"), ("C", f'{{"name": "add", "arguments": {ARGUMENTS}}}'), ("R", "<image>3"), ("M", "three")]
    row = {
        "chat": [{"who": role, "says": value} for role, value in said],
        "pics": ["a.png"],
        "can": [json.dumps(FUNCTION)],
    }
    tags = {"user_tag": "U", "assistant_tag": "M", "function_tag": "C", "observation_tag": "R"}
    sample = convert(row, messages="chat", images="pics", tools="can", role_tag="who", content_tag="says", **tags)
    assert sample.messages == [SOLVED[0], LONG_CALL, {"role": "tool", "content": [IMAGE, text("3")]}, SOLVED[3]]
    assert sample.media == [PICTURE]
    assert sample.tools == [{"type": "function", "function": FUNCTION}]


@pytest.mark.parametrize("arguments", [ARGUMENTS, CALL["function"]["arguments"]], ids=["text", "object"])
@pytest.mark.parametrize("reasoning", ["reasoning_content", "reasoning", "thinking"])
def test_tool_turns_of_openai(arguments: Any, reasoning: str) -> None:
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": arguments}} for n in (1, 2)]
    row = {
        "messages": [
            SOLVED[0],
            {"role": "assistant", "content": None, "tool_calls": calls, reasoning: "I had better ask."},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            {"role": "tool", "tool_call_id": "c2", "name": "add", "content": [text("3")]},
            SOLVED[3],
        ],
        "tools": [{"type": "function", "function": FUNCTION, "strict": None}],
    }
    sample = convert(row, formatting="openai")
    assert sample.messages == [
        SOLVED[0],
        {**SOLVED[1], "tool_calls": [{"id": "c1", **CALL}, {"id": "c2", **CALL}]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "name": "add", "content": "3"},
        SOLVED[3],
    ]
    assert sample.weights == [None, 1, None, None, 1]
    assert sample.tools == [{"type": "function", "function": FUNCTION}]


def test_openais_old_function_calls() -> None:
    row = {
        "messages": [
            SOLVED[0],
            {"role": "assistant", "function_call": {"name": "add", "arguments": ARGUMENTS}},
            {"role": "function", "name": "add", "content": "3"},
            SOLVED[3],
        ]
    }
    assert convert(row).messages == [
        SOLVED[0],
        LONG_CALL,
        {"role": "tool", "name": "add", "content": "3"},
        SOLVED[3],
    ]


def test_a_conversation_may_end_with_a_call() -> None:
    assert convert({"messages": [SOLVED[0], LONG_CALL]}).weights == [None, 1]


# --- preference ------------------------------------------------------------------------------------------------------

ANSWERS = {
    "texts": ("seven", "one"),
    "messages": ({"from": "gpt", "value": "seven"}, {"from": "gpt", "value": "one"}),
    "lists": ([{"role": "assistant", "content": "seven"}], [{"role": "assistant", "content": "one"}]),
}


@pytest.mark.parametrize(
    ("row", "attr"),
    [
        ({"conversations": sharegpt("<image>Which?")}, {}),
        ({"messages": turns("<image>Which?")}, {"formatting": "openai"}),
        ({"prompt": turns("<image>Which?")}, {}),
        ({"prompt": "<image>Which?"}, {}),
        ({"instruction": "<image>Which?", "input": ""}, {"formatting": "alpaca"}),
        ({"prompt": "<image>Which?"}, {"formatting": "alpaca", "prompt": "prompt"}),
    ],
    ids=["LLaMA-Factory", "openai", "TRL", "TRL text", "alpaca", "alpaca named"],
)
@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS.keys())
def test_preference_rows(row: dict[str, Any], attr: dict[str, Any], answers: tuple[Any, Any]) -> None:
    row = {**row, "better": answers[0], "worse": answers[1], "images": ["a.png"], "system": "Be brief."}
    sample = convert(row, ranking=True, chosen="better", rejected="worse", **attr)
    before = [{"role": "system", "content": "Be brief."}, turns([IMAGE, text("Which?")])[0]]
    rejected = Sample(PLACE, [*before, {"role": "assistant", "content": "one"}], [None, None, 1], [PICTURE])
    chosen = [*before, {"role": "assistant", "content": "seven"}]
    assert sample == Sample(PLACE, chosen, [None, None, 1], [PICTURE], rejected=rejected)


def test_whole_conversations_are_trained_where_they_differ() -> None:
    whole = {"chosen": turns("a", "b", "c", "good"), "rejected": turns("a", "b", "c", "bad", "d", "worse")}
    for row in (whole, {**whole, "prompt": "a", "messages": turns("a", "b", "c", "good")}):
        sample = convert(row, ranking=True)
        assert sample.messages == whole["chosen"]
        assert sample.weights == [None, 0, None, 1]
        assert sample.rejected is not None
        assert sample.rejected.messages == whole["rejected"]
        assert sample.rejected.weights == [None, 0, None, 1, None, 1]


@pytest.mark.parametrize(
    ("row", "field", "message"),
    [
        ({"messages": turns("a"), "chosen": "b", "rejected": "b"}, "rejected", "are the same"),
        (
            {"messages": turns("a"), "chosen": "b", "rejected": {"role": "assistant", "content": ""}},
            "rejected",
            "the answer is empty",
        ),
        ({"messages": turns("a"), "chosen": "b"}, "rejected", "the field is missing"),
        ({"messages": turns("a"), "chosen": "", "rejected": "b"}, "chosen", "'' is not an answer"),
        ({"messages": turns("a"), "chosen": 1, "rejected": "b"}, "chosen", "1 is not an answer"),
        ({"messages": turns("a", "b"), "chosen": "c", "rejected": "d"}, "message 1", "end with a turn of the model"),
        ({"chosen": "c", "rejected": "d"}, "rejected", "chosen and rejected begin differently"),
        ({"chosen": turns("a")[0], "rejected": "d"}, "messages", "nothing comes before the answers"),
        (
            {"chosen": turns("a", "b"), "rejected": turns("a", "b", "c", "d")},
            "rejected",
            "one is the beginning of the other",
        ),
        ({"messages": turns("a"), "chosen": [{"role": "x", "content": "b"}], "rejected": "b"}, "chosen 0", "'x'"),
    ],
)
def test_a_wrong_pair_names_row_field_and_value(row: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        convert(row, ranking=True)
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == ("rows.jsonl:7", field)
    assert message in problem.what


# --- what is wrong ---------------------------------------------------------------------------------------------------


RESULT = {"role": "tool", "content": "x"}


def called(value: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": "?"}, {"from": "function_call", "value": value}]}


@pytest.mark.parametrize(
    ("row", "field", "message"),
    [
        ({"speech": "x"}, "data.dataset_param.attr", "the row has ['speech']; tried: list of turns ("),
        ({"question": "x"}, "data.dataset_param.attr.response", "'question' holds a question, and nothing answers it"),
        ({"query": "x", "prompt": "y", "response": "z"}, "data.dataset_param.attr.prompt", "query, prompt"),
        ({"problem": "x", "answer": "y", "solution": "z"}, "data.dataset_param.attr.response", "answer, solution"),
        ({"chosen": "c", "rejected": "d"}, "rejected", "the row holds a preference pair and no answer of its own"),
        ({"text": "x", "image": "a.png"}, "image", "the row has a text and images, but no turns"),
        ({"messages": "hello"}, "messages", "'hello' is not a list of messages"),
        ({"messages": None}, "messages", "None is not a list of messages"),
        ({"messages": turns("hi", 5)}, "message 1.content", "5 is not text"),
        ({"messages": turns("hi", None)}, "message 1.content", "None is not text"),
        ({"messages": ["hi"]}, "message 0", "'hi' is not a message"),
        ({"messages": [{"speaker": "x"}]}, "message 0", "has the fields ['speaker']"),
        ({"messages": []}, "messages", "no trainable token"),
        ({"messages": turns("hi")}, "messages", "no trainable token"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "message 0", "unknown role 'narrator'"),
        ({"messages": [*turns("a", "b"), *turns("c", "d"), *turns("e")]}, "messages", "nothing answers it"),
        ({"messages": [turns("a")[0], RESULT, turns("a", "b")[1]]}, "message 1", "follows the turn of the user"),
        ({"messages": [RESULT, *turns("a", "b")]}, "message 0", "a result of a tool follows nothing"),
        ({"messages": [turns("a", "b")[1]]}, "messages", "no turn of the user"),
        ({"messages": turns("a", "b", [IMAGE]), "images": ["a"]}, "messages", "the last turn is the user's"),
        ({"messages": turns([IMAGE], "x")}, "images", "1 <image> placeholders in the text, but 0 images"),
        ({"messages": turns("<image>", "b"), "image": ["1", "2"]}, "image", "1 <image> placeholders in"),
        ({"messages": turns("<video><video>", "x"), "video": "v"}, "video", "2 <video> placeholders in"),
        ({"messages": turns("<image>", "x"), "image": "a", "video": "v"}, "video", "0 <video> placeholders"),
        ({"messages": turns([{"type": "audio"}], "x"), "audios": ["1", "2"]}, "audios", "1 <audio> placeholders"),
        ({"messages": turns("<image>", "x"), "images": [3]}, "images", "[3] is not a list of media"),
        ({"messages": turns("<image>", "x"), "images": [{"size": "3"}]}, "images[0]", "is not an image"),
        ({"messages": turns([{"type": "text"}], "x")}, "message 0.content[0].text", "None is not text"),
        ({"messages": turns([{"type": "smell", "smell": "x"}], "x")}, "message 0.content[0]", "is not a part of"),
        ({"messages": turns([IMAGE | {"image": 3}], "x")}, "message 0.content[0]", "3 is not an image"),
        ({"messages": [*turns("a"), {"role": "assistant", "content": "b", "weight": -1}]}, "message 1.weight", "-1"),
        ({"messages": [*turns("a"), {"role": "assistant", "content": "b", "weight": True}]}, "message 1.weight", "T"),
        ({"messages": [*turns("a"), {"role": "assistant", "content": "b", "weight": 1e300}]}, "message 1.weight", "1"),
        ({"messages": [*turns("a"), {"role": "assistant", "content": "b", "train": "no"}]}, "message 1.train", "'no'"),
        ({"messages": [*turns("a"), LONG_CALL | {"thinking": 3}]}, "message 1.thinking", "3 is not text"),
        ({"messages": [*turns("a"), LONG_CALL | {"tool_calls": [{}]}]}, "message 1.tool_calls[0]", "not a tool call"),
        (called("add(1, 2)"), "message 1.value", "'add(1, 2)' holds no tool call"),
        (called('{"name": "add", "arguments": {'), "message 1.value", "is not JSON"),
        (called('{"name": "add", "arguments": [1]}'), "message 1.value[0].arguments", "[1] is not an object"),
        ({"messages": turns("a", "b"), "tools": "[{]"}, "tools", "is not JSON"),
        ({"messages": turns("a", "b"), "tools": [{"parameters": {}}]}, "tools[0]", "does not describe a tool"),
        ({"messages": turns("a", "b"), "system": 3}, "system", "3 is not text"),
    ],
)  # fmt: skip
def test_a_wrong_row_names_row_field_and_value(row: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        convert(row)
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == ("rows.jsonl:7", field)
    assert message in problem.what


@pytest.mark.parametrize(
    ("row", "field", "message"),
    [
        ({"instruction": "a"}, "data.dataset_param.attr.response", "'instruction' holds a question, and nothing"),
        ({"instruction": "a", "output": 3}, "output", "3 is not text"),
        ({"question": "a", "answers": {"text": ["b"], "answer_start": [3]}}, "answers", "is not text"),
        ({"prompt": "a", "response": [{"type": "text", "text": "b"}]}, "response", "is not text"),
        ({"prompt": "a", "response": [{"who": "me", "says": "b"}]}, "response 0", "not 'from' and 'value'"),
        ({"output": "a"}, "data.dataset_param.attr", "no row format fits: the row has ['output']"),
        ({"instruction": "", "input": "", "output": "a"}, "instruction", "'' is not an instruction"),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, "history", "not [question, answer]"),
    ],
)
def test_a_wrong_alpaca_row(row: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        convert(row, formatting="alpaca")
    assert caught.value.problems[0].key == field
    assert message in caught.value.problems[0].what


@pytest.mark.parametrize(
    ("value", "word"),
    [(3, "'3'"), (0.5, "'0.5'"), (True, "'true'"), (Decimal("0.25"), "'0.25'"), (date(2026, 1, 2), "'2026-01-02'")],
)
def test_a_number_is_no_answer_and_its_words_are_the_way_out(value: object, word: str) -> None:
    """3 may be the number of a choice, and 3.0 a count out of a column with gaps: neither is guessed."""
    rows: tuple[dict[str, Any], ...] = (
        {"question": "How many?", "answer": value},
        {"instruction": "How many?", "output": value},
        {"messages": turns("How many?", value)},
        {"messages": turns("How many?", [{"type": "text", "text": value}])},
    )
    for row in rows:
        with pytest.raises(DataError, match="is not text") as caught:
            convert(row)
        assert caught.value.problems[0].way_out == f"Write the words that are meant as text, such as {word}.", row


@pytest.mark.parametrize(
    ("contents", "is_told"),
    [
        (["<image>make it night", "<image>"], True),
        (["<image>", "<image>"], False),
        (["<image>", "Here it is at night: <image>"], True),
        (["a cat", "<image>", "<image>", "<image>"], False),  # the second change is not told
        (["a cat", "<image><image>"], True),
        (["<image>", "a cat"], True),  # nothing is drawn
    ],
)
def test_a_picture_that_is_drawn_without_words_is_told(contents: list[str], is_told: bool) -> None:
    pictures = ["a.png"] * sum(content.count("<image>") for content in contents)
    row = {"messages": turns(*contents), "images": pictures}
    sample = convert_row(row, RowFormat.from_attr(DatasetAttr.model_validate({})), PLACE, draws=True)
    assert (DRAWN_UNASKED not in sample.notes) == is_told
    assert DRAWN_UNASKED not in convert({"messages": turns("a", "b")}).notes


def test_the_way_out_is_one_that_fits_the_row() -> None:
    with pytest.raises(
        DataError, match=r"attr.messages \(a list of turns\), or .*attr.prompt and .*attr.response \(a q"
    ):
        convert({"ask": "<image>1 + 2?", "reply": "3"})
    assert convert({"ask": "1 + 2?", "reply": "3"}, prompt="ask", response="reply").messages == turns("1 + 2?", "3")
    with pytest.raises(DataError, match=r"The row has no column 'images': name the column in .*attr.images, or write"):
        convert({"messages": turns("<image>", "b"), "picture": "a.png"})


def test_a_column_that_is_named_is_the_only_one_looked_at() -> None:
    with pytest.raises(DataError, match="the field is missing"):
        convert({"messages": turns("a", "b")}, messages="chat")
    with pytest.raises(DataError, match="1 <image> placeholders in the text, but 0 images"):
        convert({"messages": turns("<image>", "b"), "images": ["a.png"]}, images="pics")


def test_text_rows() -> None:
    assert convert_text({"text": "once upon a time"}, PLACE).text == "once upon a time"
    for row in ({}, {"text": None}, {"text": "  "}):
        with pytest.raises(DataError, match="text"):
            convert_text(row, PLACE)
