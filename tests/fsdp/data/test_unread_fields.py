"""A field that somebody puts into a row, a turn or a part is obeyed, refused or reported; none is passed over."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_mm.core.batch import IGNORED_LABEL
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data import build_mm_dataloader, build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.convert import convert_row
from mindspeed_mm.fsdp.data.data_utils.prompts import with_answer
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.rows.turns import MARKS
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation, Sample, Unread
from mindspeed_mm.fsdp.params.data_args import DataloaderParam, DatasetParam
from mindspeed_mm.tasks.data import check
from mindspeed_mm.tasks.requests.data import DataCheckRequest
from tests.fsdp.data.conftest import conversation, picture, write_jsonl
from tests.fsdp.data.row_formats import FORMATS, PICTURE, turn
from tests.helpers.tiny_media import write_video
from tests.tasks.data_rows import add_rows, make_run

from transformers import AutoTokenizer  # isort: skip  (after tests.helpers, which guards torchvision)

PLACE = RowLocation("rows.jsonl", 7)
STAGES = {"sft": "sft", "dpo": "rm", "grpo": "prompt"}

# --- names from the readers of other tools, and invented ones --------------------------------------------------------

OF_ROWS = (
    # ms-swift: RowPreprocessor.standard_keys, StdTemplateInputs
    "objects", "rejected_images", "rejected_videos", "rejected_audios", "rejected_tools", "rejected_objects", "label",
    "margin", "teacher_prompt", "chat_template_kwargs", "mm_processor_kwargs", "positive_messages",
    "negative_messages", "ref_audios", "audio_codes", "system_prompt", "history",
    # LLaMA-Factory: DatasetAttr, v1's samples
    "system", "tools", "images", "videos", "audios", "kto_tag", "loss_weight",
    # TRL, verl, axolotl, Qwen-VL, InternVL, Fireworks
    "completions", "labels", "enable_thinking", "reward_model", "agent_name", "segments", "clip", "weight",
    "image_sizes", "bbox", "conversations", "text", "context",
    "invented", "dataset_mask", "xyz",
)  # fmt: skip
OF_TURNS = (
    "loss", "loss_scale", "loss_weight", "weight", "train", "training", "trainable", "mask", "learn", "loss_mask",
    "train_detail", "training_detail", "reasoning_training_detail", "name", "tool_calls", "function_call",
    "tool_call_id", "reasoning_content", "reasoning", "thinking", "refusal", "audio", "annotations", "prefix",
    "recipient", "end_turn", "channel_of", "images", "label", "invented", "skip_me",
)  # fmt: skip
OF_PARTS = (
    "min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width", "fps", "nframes", "min_frames",
    "max_frames", "video_start", "video_end", "sample_fps", "raw_fps", "detail", "train", "weight", "cache_control",
    "bbox_2d", "crop", "invented",
)  # fmt: skip
VALUES: tuple[Any, ...] = (True, False, 2, 0.5, "words", ["a"], {"a": 1})


def read(row: dict[str, Any], method: str) -> Sample:
    """A row as the data set of a method reads it."""
    row_format = RowFormat().of_stage(STAGES[method])
    if method == "grpo":
        row, row_format = with_answer(row, row_format, PLACE)
    return convert_row(row, row_format, PLACE, rewarded=method == "grpo")


def places(row: Any, level: str, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the objects of a level are in a row."""
    if level == "row":
        return [()]
    found = []
    for key, value in row.items() if isinstance(row, dict) else enumerate(row) if isinstance(row, list) else ():
        is_turn = isinstance(value, dict) and ("role" in value or "from" in value or "human" in value)
        is_part = isinstance(value, dict) and value.get("type") in ("text", "image", "image_url", "video", "audio")
        if (level == "turn" and is_turn) or (level == "part" and is_part):
            found.append((*at, key))
        found += places(value, level, (*at, key))
    return found


def put(row: dict[str, Any], at: tuple[Any, ...], name: str, value: Any) -> dict[str, Any] | None:
    """The row with a field more; None where it is there."""
    row = copy.deepcopy(row)
    holder: Any = row
    for key in at:
        holder = holder[key]
    if name in holder:
        return None
    holder[name] = value
    return row


LEVELS = {"row": OF_ROWS, "turn": OF_TURNS, "part": OF_PARTS}


@pytest.mark.edge("BR2")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("method", STAGES)
@pytest.mark.parametrize("name", FORMATS)
def test_no_field_is_passed_over(name: str, method: str, level: str) -> None:
    format_ = FORMATS[name]
    if getattr(format_, method):
        return  # refused as it is
    base = format_.row(name != "document")
    if name == "document":
        base = format_.row(False)
    before = read(base, method)
    tried = 0
    for at in places(base, level):
        if at and is_unused(base, at[0], before, method):
            continue
        for field in LEVELS[level]:
            for value in VALUES:
                row = put(base, at, field, value)
                if row is None:
                    continue
                tried += 1
                try:
                    after = read(row, method)
                except DataError as error:
                    assert error.problems[0].way_out
                    continue
                is_reported = any(field in each.name for each in after.unread)
                is_rewarded = level == "row" and method == "grpo"
                is_neutral = is_no_mark(level, field, value) or describes(level, field, held(row, at))
                is_dropped = after == before and not (is_reported or is_rewarded or is_neutral)
                assert not is_dropped, f"{value!r} in {field} at {at} is passed over"
    assert tried or level != "row"


def is_unused(row: dict[str, Any], column: str, sample: Sample, method: str) -> bool:
    """Whether a column is nothing to a method, which reports it as a whole or hands it to rewards."""
    try:
        return read({name: value for name, value in row.items() if name != column}, method) == sample
    except DataError:
        return False


def held(row: Any, at: tuple[Any, ...]) -> Any:
    for key in at:
        row = row[key]
    return row


def describes(level: str, field: str, holder: dict[str, Any]) -> bool:
    """Whether a field is known to change nothing there: calls have ids, and what is not trained stays so."""
    if field == "conversations" and "chosen" in holder:  # whole conversations hold what comes before their ends
        return True
    if level == "turn" and field == "tool_call_id":
        return holder.get("role", holder.get("from")) not in ("tool", "observation")
    return field in MARKS and holder.get("loss_weight") == 0


def is_no_mark(level: str, field: str, value: Any) -> bool:
    """Whether a mark says what holds without it."""
    if level == "row" or field not in MARKS:
        return False
    return value is False if field == "mask" else value is True


@pytest.mark.edge("BR2")
def test_what_would_change_the_view_is_reported_to_rewards_too() -> None:
    row = conversation("a", "b", chat_template_kwargs={"enable_thinking": False}, difficulty_of=3)
    assert [str(each) for each in read(row, "grpo").unread] == ["column 'chat_template_kwargs'"]
    assert {each.name for each in read(row, "sft").unread} == {"chat_template_kwargs", "difficulty_of"}


@pytest.mark.edge("BR2")
def test_what_describes_a_row_is_neither_refused_nor_reported() -> None:
    row = conversation("a", "b", id=3, source="web", split="train", image_id=7, license="CC0", width=32)
    row["messages"][1] |= {"id": 1, "timestamp": 1.5, "created_at": "today"}
    assert read(row, "sft").unread == []


# --- marks of training -----------------------------------------------------------------------------------------------

UNTRAINED = [
    {"loss": False}, {"loss": 0}, {"train": False}, {"trainable": False}, {"training": False}, {"learn": False},
    {"loss_mask": 0}, {"mask": True}, {"mask": 1}, {"weight": 0}, {"loss_weight": 0.0}, {"loss_scale": 0.0},
    {"weight": 1, "train": False}, {"loss": True, "mask": True},
]  # fmt: skip
TRAINED = [{"loss": True}, {"loss_mask": 1}, {"mask": False}, {"weight": 1}, {"loss_scale": 1.0}, {"training": True}]


@pytest.mark.edge("BR1")
@pytest.mark.parametrize("spelled", [*UNTRAINED, *TRAINED], ids=str)
@pytest.mark.parametrize("tags", [("role", "content", "user", "assistant"), ("from", "value", "human", "gpt")])
def test_a_turn_is_trained_or_not_in_every_spelling(
    text_folder: Path, tmp_path: Path, spelled: dict[str, Any], tags: tuple[str, str, str, str]
) -> None:
    role, content, user, assistant = tags
    said = [(user, "a"), (assistant, "red"), (user, "b"), (assistant, "blue")]
    turns: list[dict[str, Any]] = [{role: who, content: text} for who, text in said]
    turns[1] |= spelled
    dataset = open_dataset(text_folder, write_jsonl(tmp_path / "rows.jsonl", [{"messages": turns}]))
    sample = dataset[0]
    trained = dataset.processor.decode(sample["input_ids"][sample["labels"] != IGNORED_LABEL])
    assert trained == ("red<|im_end|>" if spelled in TRAINED else "") + "blue<|im_end|>"


@pytest.mark.edge("BR1")
@pytest.mark.parametrize(
    ("fields", "key", "told"),
    [
        ({"skip_it": True}, "skip_it", "may say what is trained"),
        ({"importance": 0.5}, "importance", "may say what is trained"),
        ({"loss": "no"}, "loss", "neither true nor false"),
        ({"loss_scale": -1}, "loss_scale", "not a number from 0"),
        ({"weight": 1, "loss_scale": 2}, "", "the weights of the turn differ: weight 1, loss_scale 2"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}, "train_detail", "parts of a turn"),
    ],
)
def test_an_unknown_mark_is_refused(fields: dict[str, Any], key: str, told: str) -> None:
    row = conversation("a", "b")
    row["messages"][1] |= fields
    with pytest.raises(DataError, match=told) as caught:
        read(row, "sft")
    problem = caught.value.problems[0]
    assert (problem.where, problem.key) == ("rows.jsonl:7", "message 1" + (f".{key}" if key else ""))


def test_marks_of_a_question_with_its_answer_are_the_answers() -> None:
    row = {"conversation": [{"human": "a", "assistant": "b", "loss": False}, {"user": "c", "bot": "d"}]}
    assert read(row, "sft").weights == [None, 0.0, None, 1.0]


# --- what is asked of one medium -------------------------------------------------------------------------------------


def open_dataset(model: Path, file: Path, **basic: Any) -> Any:
    param = {
        "basic_parameters": {"dataset": str(file), "cutoff_len": 8192, **basic},
        "preprocess_parameters": {"model_name_or_path": str(model)},
    }
    return build_mm_dataset(DatasetParam.model_validate(param))[0]


def asking(medium: dict[str, Any], **row: Any) -> dict[str, Any]:
    return {"messages": [turn("user", [medium, {"type": "text", "text": "?"}]), turn("assistant", "that")], **row}


@pytest.mark.edge("BR2")
def test_a_part_of_a_video_is_what_the_model_sees(vlm_folder: Path, tmp_path: Path) -> None:
    """A frame is as bright as its number: 40 frames, 10 a second."""
    write_video(tmp_path / "v.mp4", [6 * n for n in range(40)], fps=10)
    video = {"type": "video", "video": "v.mp4"}
    rows = [
        asking(video | {"video_start": 1.0, "video_end": 2.0, "fps": 10}),
        asking(video | {"start": 1.0, "end": 2.0, "nframes": 4}),
        asking(video | {"fps": 5, "max_frames": 6}),
        {"video": "v.mp4", "clip": [1.0, 2.0], "messages": [turn("user", "<video>?"), turn("assistant", "that")]},
        asking(video | {"video_start": 9}),
    ]
    dataset = open_dataset(vlm_folder, write_jsonl(tmp_path / "rows.jsonl", rows))
    expected = [list(range(10, 21)), [10, 13, 16, 20], np.linspace(0, 39, 6).astype(int).tolist()]
    for index, frames in enumerate(expected):
        source = dataset.sample(index).media[0].source
        clip = dataset.media.load_video(source)
        assert list(clip.header.indices) == frames == list(dataset.media.probe("video", source).indices)
        brightness = clip.frames.mean(axis=(1, 2, 3))
        assert np.abs(brightness - 0.75 * 6 * np.array(frames)).max() < 2  # the upper half is half as bright
        assert dataset.measure(index).tokens == len(dataset[index]["input_ids"])
    assert dataset.media.probe("video", dataset.sample(3).media[0].source).timestamps[0] >= 1.0
    with pytest.raises(DataError, match=r"rows.jsonl:5 .*the part from 9 s holds no frame: the video has 4.00 s"):
        dataset[4]


@pytest.mark.edge("BR2")
def test_pixel_bounds_of_one_picture(vlm_folder: Path, tmp_path: Path) -> None:
    from mindspeed_mm.fsdp.utils.processor import load_processor

    picture(256, 128, seed=1).save(tmp_path / PICTURE)
    image = {"type": "image", "image": PICTURE}
    rows = [asking(image), asking(image | {"max_pixels": 1024}), {**asking(image), "images": []}]
    rows[2]["messages"][0]["content"][0] = {"type": "image_url", "image_url": {"url": PICTURE, "max_pixels": 1024}}
    dataset = open_dataset(vlm_folder, write_jsonl(tmp_path / "rows.jsonl", rows))
    processor: Any = load_processor(vlm_folder)
    processor.image_processor.size = {**dict(processor.image_processor.size), "longest_edge": 1024}
    bounded = processor(text="<|image_pad|>", images=[picture(256, 128, seed=1)], return_tensors="np")
    for index in (1, 2):
        media = dataset[index]["media"]
        assert list(media[0].tensors["grid_thw"]) == bounded["image_grid_thw"][0].tolist()
        assert np.array_equal(dataset.plugin.collate(media)["pixel_values"].numpy(), bounded["pixel_values"])
        assert dataset.measure(index).tokens == len(dataset[index]["input_ids"])
    assert dataset.measure(0).tokens > dataset.measure(1).tokens


# --- boxes -----------------------------------------------------------------------------------------------------------

BOXES = {"ref": ["a cat"], "bbox": [[16, 8, 48, 24], [32, 16]]}


@pytest.mark.edge("BR2")
def test_boxes_of_objects_are_written_as_the_family_does(vlm_folder: Path, tmp_path: Path) -> None:
    """Of 64 × 32 pixels, in thousandths: Qwen3-VL."""
    picture(64, 32).save(tmp_path / PICTURE)
    rows = [
        conversation("<image>Where is <ref-object>?", "<bbox>, at <bbox>", images=[PICTURE], objects=BOXES),
        conversation("<image>Where?", "<bbox>", images=[PICTURE],
                     objects={"ref": [], "bbox": [[0.5, 1.0, 0.25, 0.0]], "bbox_type": "norm1"}),
        conversation("<image>Where?", "There.", images=[PICTURE], objects=BOXES),
        conversation("<image>Where is <ref-object>?", "<bbox>", images=[PICTURE], objects=BOXES),
        conversation("What does <bbox> mean?", "A mark."),
    ]  # fmt: skip
    dataset = open_dataset(vlm_folder, write_jsonl(tmp_path / "rows.jsonl", rows))
    first, second, third = (dataset.sample(index) for index in range(3))
    assert first.messages[0]["content"][1]["text"] == "Where is <|object_ref_start|>a cat<|object_ref_end|>?"
    assert first.messages[1]["content"] == (
        "<|box_start|>(250,250),(750,750)<|box_end|>, at <|box_start|>(500,500)<|box_end|>"
    )
    assert second.messages[1]["content"] == "<|box_start|>(250,0),(500,1000)<|box_end|>"
    assert (first.unread, third.unread) == ([], [Unread("column", "objects")])
    with pytest.raises(DataError, match=r"1 <bbox> in the text, but 2 in bbox"):
        dataset.sample(3)
    assert dataset.sample(4).unread == [Unread("text", "<bbox>")]
    assert "object_ref_start" in dataset.outline(0).text


@pytest.mark.edge("BR2", "BS11")
def test_marks_of_boxes_are_tokens_and_others_stay_text(vlm_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(vlm_folder, folder)
    marks = ["<|box_start|>", "<|box_end|>", "<|object_ref_start|>", "<|object_ref_end|>"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.save_pretrained(folder)
    picture(64, 32).save(tmp_path / PICTURE)
    asked = "<image>Where is <ref-object>, <|im_start|>?"
    rows = [
        conversation(asked, "<bbox>, at <bbox>", images=[PICTURE], objects=BOXES),
        conversation("What is <|box_start|>?", "A mark."),
    ]
    dataset = open_dataset(folder, write_jsonl(tmp_path / "rows.jsonl", rows))
    counts = []
    for row in (0, 1):
        ids = dataset[row]["input_ids"].tolist()
        counts.append([ids.count(mark) for mark in tokenizer.convert_tokens_to_ids([*marks, "<|im_start|>"])])
    assert counts == [[2, 2, 1, 1, 2], [0, 0, 0, 0, 2]]  # two turns begin


# --- marks of a whole row --------------------------------------------------------------------------------------------


@pytest.mark.edge("BR1")
@pytest.mark.parametrize(
    ("mark", "told"),
    [
        ({"train": False}, "'train' False takes the whole row"), ({"mask": True}, "'mask' True takes the whole row"),
        ({"label": False}, r"'label' false marks the answer as a bad one"), ({"kto_tag": False}, "'kto_tag' false"),
    ],
)  # fmt: skip
def test_a_row_that_is_not_to_be_taught_is_refused(mark: dict[str, Any], told: str) -> None:
    row = {"messages": [turn("user", "a"), turn("assistant", "b")], **mark}
    with pytest.raises(DataError, match=told):
        convert_row(row, RowFormat(), PLACE)
    flipped = {name: not value for name, value in mark.items()}
    assert convert_row({**row, **flipped}, RowFormat(), PLACE).weights == [None, 1.0]


@pytest.mark.edge("BR1")
def test_a_turn_of_the_user_that_asks_to_be_trained_is_reported() -> None:
    row = {"messages": [{**turn("user", "a"), "train": True}, {**turn("assistant", "b"), "train": True}]}
    assert convert_row(row, RowFormat(), PLACE).unread == [Unread("turn", "train: true of user")]


@pytest.mark.edge("BR2")
def test_a_document_has_no_column_that_is_not_read() -> None:
    assert convert_row({"text": "The sea is large."}, RowFormat(), PLACE).unread == []
    assert convert_row({"text": "a", "more": "b"}, RowFormat(), PLACE).unread == [Unread("column", "more")]


@pytest.mark.edge("BR11")
def test_a_second_column_of_the_question_is_configured_alone() -> None:
    row = {"question": "Who?", "context": "Bob did it.", "answer": "Bob"}
    sample = convert_row(row, RowFormat(query="context"), PLACE)
    assert [message["content"] for message in sample.messages] == ["Who?\nBob did it.", "Bob"] and not sample.unread
    assert convert_row(row, RowFormat(), PLACE).unread == [Unread("column", "context")]


# --- paths in texts --------------------------------------------------------------------------------------------------


@pytest.mark.edge("BR3")
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Picture 1: <img>images/0_0.png</img>\nWhat is it?", "<img>…</img>"),
        ("<audio>a.wav</audio>What is said?", "<audio>…</audio>"),
        ("![a cat](images/cat.png) What is it?", "![…](…)"),
    ],
)
def test_a_path_in_a_text_is_reported(text: str, told: str) -> None:
    if text.startswith("<audio>"):
        text = "Audio 1: <img>a.wav</img>"
        told = "<img>…</img>"
    assert read(conversation(text, "b"), "sft").unread == [Unread("text", told)]
    assert read(conversation("An <img> tag, a [link](a.png) and 1 < 2.", "b"), "sft").unread == []


# --- what people are told --------------------------------------------------------------------------------------------


@pytest.mark.edge("BR2")
def test_data_check_names_the_rows(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    odd = conversation("<img>a.png</img>What?", "b", margin=0.5)
    odd["messages"][1]["refusal_of"] = "no"
    add_rows(tmp_path, [odd, conversation("c", "d", margin=1.5)])
    result = check.run(DataCheckRequest(run, ["data.dataset_param.basic_parameters.max_samples=26"]))
    (finding,) = [each for each in result.findings if each.kind == "not read"]
    assert finding.severity == "warning" and finding.rows == 2
    assert finding.examples == (
        "column 'margin': 2 rows, the first rows.jsonl:25",
        "'refusal_of' of a turn: 1 row, the first rows.jsonl:25",
        "<img>…</img> in a text: 1 row, the first rows.jsonl:25",
    )


@pytest.mark.edge("BR2")
@pytest.mark.parametrize(("workers", "on_fly"), [(0, True), (1, True), (0, False)])
def test_training_counts_what_is_not_read(text_folder: Path, tmp_path: Path, workers: int, on_fly: bool) -> None:
    rows = [conversation(f"a {n}", "b", **({"margin": 1} if n % 2 else {})) for n in range(8)]
    cache = {"preprocess_on_fly": on_fly, "preprocessing_num_workers": 1, "cache_dir": str(tmp_path / "cache")}
    dataset = open_dataset(text_folder, write_jsonl(tmp_path / "rows.jsonl", rows), **cache)
    assert dataset.row_notes() == ["not read in the first 8 rows: column 'margin' (4); mm data check names the rows"]
    loader = build_mm_dataloader(
        dataset, DataloaderParam(num_workers=workers), micro_batch_size=4, gradient_accumulation_steps=1, dp_rank=0,
        dp_size=1, seed=3,
    )  # fmt: skip
    steps = iter(loader)
    for _ in range(2):
        assert "unread" not in next(steps)[0]
    assert dict(loader.counts.unread) == {"column 'margin'": 4}
    json.dumps(dict(loader.counts.unread))


@pytest.mark.parametrize(("of_turn", "noted"), [("S", []), ("Be exact.", [Unread("column", "system")])])
def test_a_system_column_beside_another_system_turn_is_reported(of_turn: str, noted: list[Unread]) -> None:
    messages = [{"role": "system", "content": of_turn}, *conversation("a", "b")["messages"]]
    sample = convert_row({"messages": messages, "system": "S"}, RowFormat(), PLACE)
    assert [message["role"] for message in sample.messages] == ["system", "user", "assistant"]
    assert list(sample.unread) == noted
