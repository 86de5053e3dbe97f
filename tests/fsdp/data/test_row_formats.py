"""Every format of rows × without or with a picture × SFT, DPO, GRPO: recognised by its columns, or refused for a
reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.convert import convert_row
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation, Sample
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.tasks.data.opening import OpenedData
from tests.fsdp.data.conftest import picture, write_jsonl
from tests.fsdp.data.row_formats import ANSWER, FORMATS, PICTURE, QUESTION, WORSE, Format

STAGES = {"sft": "sft", "dpo": "rm", "grpo": "prompt"}
CELLS = [(name, media) for name in FORMATS for media in (False, True)]
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def open_rows(vlm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Open:
    """The data set of a method over a row of each cell; nothing of `attr` is given."""
    folder = tmp_path_factory.mktemp("formats")
    picture(48, 32, seed=1).save(folder / PICTURE)
    made: dict[str, Any] = {}

    def data_set(method: str) -> Any:
        if method not in made:
            readable = [cell for cell in CELLS if not getattr(FORMATS[cell[0]], method)]
            ordered = sorted(CELLS, key=lambda cell: cell not in readable)
            write_jsonl(folder / f"{method}.jsonl", [FORMATS[name].row(media) for name, media in ordered])
            basic = {"dataset": str(folder / f"{method}.jsonl"), "stage": STAGES[method], "cutoff_len": 4096}
            param = {"basic_parameters": basic, "preprocess_parameters": {"model_name_or_path": str(vlm_folder)}}
            made[method] = build_mm_dataset(DatasetParam.model_validate(param))[0], ordered
        return made[method]

    return data_set


def spoken(sample: Sample) -> list[tuple[str, str]]:
    """Role and words of each turn; a picture is `<image>`."""
    found = []
    for message in sample.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", f"<{part['type']}>") for part in content)
        found.append((message["role"], content))
    return found


def expected_turns(format_: Format, media: bool, answer: str) -> list[tuple[str, str]]:
    asked = ("<image>" if media else "") + QUESTION
    middle = [("assistant", ""), ("tool", "7")] if "tool" in format_.turns else []
    system = [("system", format_.system)] if format_.system else []
    return [*system, ("user", asked), *middle, ("assistant", answer)]


@pytest.mark.edge("BR11")
@pytest.mark.parametrize("method", STAGES)
@pytest.mark.parametrize(("name", "media"), CELLS)
def test_a_format_is_recognised_or_refused(open_rows: Open, name: str, media: bool, method: str) -> None:
    dataset, ordered = open_rows(method)
    index, format_ = ordered.index((name, media)), FORMATS[name]
    refusal = getattr(format_, method)
    if name == "document" and media and not refusal:
        refusal = "the row has a text and images, but no turns"
    if refusal:
        with pytest.raises(DataError, match=refusal) as caught:
            dataset.sample(index)
        assert caught.value.problems[0].way_out
        return
    sample = dataset.sample(index)
    pictures = [Path(item.source).name for item in sample.media]
    assert pictures == [PICTURE] * media
    if name == "document":
        assert (sample.text, sample.messages) == (ANSWER, [])
        return
    lacks_answer = method == "grpo" and format_.sft
    assert spoken(sample) == expected_turns(format_, media, "" if lacks_answer else ANSWER)
    assert (sample.rejected is not None) == (method == "dpo")
    if sample.rejected is not None:
        assert spoken(sample.rejected) == expected_turns(format_, media, WORSE)
        assert sample.weights[-1] == sample.rejected.weights[-1] == 1
    if method == "sft":
        assert tuple(map(str, sample.unread)) == format_.unread
    if name == "tools":  # the chat template of this small model writes none
        return
    encoded = dataset[index]  # and what training reads of it
    if method == "grpo":
        text = dataset.template.render(sample.messages[:-1], add_generation_prompt=True)
        assert dataset.outline(index).text == text
        assert (encoded["text"], len(encoded["media"])) == (QUESTION, media)
        assert encoded["input_ids"].tolist() == dataset.outline(index).input_ids.tolist() or media


@pytest.mark.edge("BR11")
def test_rows_of_no_format_list_what_was_tried_and_the_words_that_settle_it(vlm_folder: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"ask": QUESTION, "reply": ANSWER}])
    basic = {"dataset": str(tmp_path / "rows.jsonl")}
    param = {"basic_parameters": basic, "preprocess_parameters": {"model_name_or_path": str(vlm_folder)}}
    with pytest.raises(DataError) as caught:
        build_mm_dataset(DatasetParam.model_validate(param))
    told = str(caught.value)
    for word in ("rows.jsonl:1", "['ask', 'reply']", "messages|conversations|conversation", "instruction and response|",
                 "attr.prompt and", "attr.response"):  # fmt: skip
        assert word in told
    param["attr"] = {"prompt": "ask", "response": "reply"}
    assert spoken(build_mm_dataset(DatasetParam.model_validate(param))[0].sample(0)) == [
        ("user", QUESTION),
        ("assistant", ANSWER),
    ]


# --- files that list data sets ---------------------------------------------------------------------------------------


def listed(folder: Path, **changes: Any) -> dict[str, Any]:
    """A set with a picture in a folder of its own."""
    (folder / "media").mkdir(parents=True, exist_ok=True)
    picture(64, 32, seed=2).save(folder / "media" / PICTURE)
    write_jsonl(folder / "set.jsonl", [FORMATS["LLaVA"].row(True)] * 4)
    entry = {"root": str(folder / "media"), "annotation": str(folder / "set.jsonl"), "data_augment": False}
    return entry | {"repeat_time": 1, "length": 4} | changes


def data_set(model: Path, file: Path, **basic: Any) -> Any:
    param = {
        "basic_parameters": {"dataset": str(file), **basic},
        "preprocess_parameters": {"model_name_or_path": str(model)},
    }
    return build_mm_dataset(DatasetParam.model_validate(param))[0]


@pytest.mark.edge("BR11")
@pytest.mark.parametrize("streaming", [False, True])
def test_internvls_meta_file(vlm_folder: Path, tmp_path: Path, streaming: bool) -> None:
    meta = tmp_path / "meta.json"
    picture(32, 32, seed=3).save(tmp_path / PICTURE)  # beside the rows, and not the one that the meta file names
    meta.write_text(json.dumps({"zoo": listed(tmp_path), "half": listed(tmp_path / "b", repeat_time=0.5)}))
    for folder in ("elsewhere", None):
        dataset = data_set(vlm_folder, meta, dataset_dir=folder, streaming=streaming)
        assert Path(dataset.sample(0).media[0].source) == tmp_path / "media" / PICTURE
        assert Path(dataset.sample(5).media[0].source) == tmp_path / "b" / "media" / PICTURE
        assert dataset[0]["media"][0].tensors["grid_thw"][2] == 8
        assert dataset.has(5) and not dataset.has(6)
        if not streaming:
            assert [part.name for part in dataset.parts] == ["zoo", "half"]


@pytest.mark.edge("BR11")
def test_lists_of_data_sets(vlm_folder: Path, tmp_path: Path) -> None:
    entry = listed(tmp_path)
    (tmp_path / "sets.json").write_text(json.dumps([{"name": "zoo", "annotation_path": entry["annotation"]}]))
    dataset = data_set(vlm_folder, tmp_path / "sets.json", dataset_dir=str(tmp_path / "media"))
    assert (len(dataset), dataset.parts[0].name) == (4, "zoo")
    path = tmp_path / "sets.yaml"
    path.write_text(f"datasets:\n  - json_path: {entry['annotation']}\n    sampling_strategy: first:3\n")
    assert len(data_set(vlm_folder, path, dataset_dir=str(tmp_path / "media"))) == 3
    for changes, key in (({"repeat_time": 1.5}, "repeat_time"), ({"max_dynamic_patch": 6}, "max_dynamic_patch"),
                         ({"data_augment": True}, "data_augment")):  # fmt: skip
        (tmp_path / "meta.json").write_text(json.dumps({"zoo": listed(tmp_path, **changes)}))
        with pytest.raises(ConfigError) as caught:
            data_set(vlm_folder, tmp_path / "meta.json")
        assert caught.value.problems[0].key == key and "meta.json: zoo" in str(caught.value)
        if key == "max_dynamic_patch":
            assert "preprocess_parameters.image_max_tiles in the YAML" in str(caught.value)


@pytest.mark.edge("BR11")
def test_rows_that_an_epoch_reads_several_times(vlm_folder: Path, tmp_path: Path) -> None:
    for name in ("zoo", "once"):
        write_jsonl(tmp_path / f"{name}.jsonl", [FORMATS["LLaVA"].row(False) | {"id": f"{name}{n}"} for n in range(4)])
    entries = [
        {"path": str(tmp_path / "zoo.jsonl"), "name": "zoo", "repeats": 3, "share": 0.75},
        {"path": str(tmp_path / "once.jsonl"), "name": "once"},
    ]
    basic: dict[str, Any] = {"dataset": entries}
    param = {"basic_parameters": basic, "preprocess_parameters": {"model_name_or_path": str(vlm_folder)}}
    dataset: Any = build_mm_dataset(DatasetParam.model_validate(param))[0]
    ids = [dataset.row(index)["id"] for index in range(len(dataset))]
    assert ids == ["zoo0", "zoo1", "zoo2"] * 3 + ["once0", "once1", "once2", "once3"]
    assert [(part.name, part.first, part.end) for part in dataset.parts] == [("zoo", 0, 9), ("once", 9, 13)]
    assert list(dataset.row_numbers) == [0, 1, 2] * 3 + [3, 4, 5, 6]
    config: Any = None
    assert OpenedData(config, dataset).first_samples == [0, 1, 2, 9, 10, 11, 12]  # what `mm data check` reads
    basic["val_rate"] = 0.5  # of 7 rows: 3 or 4, each read once, and never trained
    train, validation = build_mm_dataset(DatasetParam.model_validate(param))
    assert validation is not None
    held_out = [validation.row(index)["id"] for index in range(len(validation))]
    trained = [train.row(index)["id"] for index in range(len(train))]
    assert len(held_out) == len(set(held_out)) in (3, 4) and set(held_out).isdisjoint(trained)
    assert sorted({*held_out, *trained}) == sorted(set(ids))
    basic |= {"streaming": True, "val_rate": None}
    with pytest.raises(ConfigError, match=r"0\.75 of the rows of 'zoo': how many there are is not known"):
        build_mm_dataset(DatasetParam.model_validate(param))
    entries[0]["share"] = None
    streamed: Any = build_mm_dataset(DatasetParam.model_validate(param))[0]
    assert streamed.has(15) and not streamed.has(16)


@pytest.mark.edge("BR11")
def test_media_of_an_entry_start_at_its_own_folder(vlm_folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        listed(tmp_path / name)
    entries = [
        {"path": str(tmp_path / name / "set.jsonl"), "media_dir": str(tmp_path / name / "media")} for name in "ab"
    ]
    param = {"basic_parameters": {"dataset": entries}, "preprocess_parameters": {"model_name_or_path": str(vlm_folder)}}
    dataset: Any = build_mm_dataset(DatasetParam.model_validate(param))[0]
    sources = [Path(dataset.sample(index).media[0].source) for index in (0, 4)]
    assert sources == [tmp_path / name / "media" / PICTURE for name in "ab"]
    assert dataset[4]["media"][0].tensors["grid_thw"][2] == 8


@pytest.mark.edge("BR11")
@pytest.mark.parametrize("column", ["sentence", "transcription", "transcript", "text", "words"])
def test_a_sound_and_what_is_said_in_it(column: str) -> None:
    row = {"audio": {"path": "a.wav", "bytes": None}, column: "A seven.", "locale": "en"}
    named = RowFormat(response="words") if column == "words" else RowFormat()
    sample = convert_row(row, named, RowLocation("rows.jsonl", 1))
    assert spoken(sample) == [("user", "<audio>"), ("assistant", "A seven.")]
    assert [(item.kind, item.source) for item in sample.media] == [("audio", "a.wav")]
    with pytest.raises(DataError, match="7 is not text"):
        convert_row(row | {column: 7}, named, RowLocation("rows.jsonl", 1))


@pytest.mark.edge("BR11")
def test_media_that_a_turn_lists_stand_in_their_order() -> None:
    def media(content: str) -> list[tuple[str, object]]:
        asked = {"role": "user", "content": content, "images": ["a.png", "b.png"], "videos": ["c.mp4"]}
        answer = {"role": "assistant", "content": ANSWER}
        sample = convert_row({"messages": [asked, answer]}, RowFormat(), RowLocation("rows.jsonl", 1))
        return [(item.kind, item.source) for item in sample.media]

    assert media("<image>Then <video> and <image>?") == [("image", "a.png"), ("video", "c.mp4"), ("image", "b.png")]
    assert sorted(media(QUESTION)) == [("image", "a.png"), ("image", "b.png"), ("video", "c.mp4")]
    assert [source for kind, source in media(QUESTION) if kind == "image"] == ["a.png", "b.png"]
    with pytest.raises(DataError, match="1 <image> placeholders in the turn, but 2 images"):
        media("<image>?")
