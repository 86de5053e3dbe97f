"""The digits example: no scan is in two splits, answers are right, the same seed writes the same, the model is the one
that is advertised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.sampling.answers.questions import read_questions
from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.quickstart import make_digits
from mindspeed_mm.quickstart.scans import NAMES

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"


@pytest.fixture(scope="module")
def scans() -> list[Any]:
    return make_digits.load_scans()


@pytest.fixture(scope="module")
def folder(scans: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example from the first 200 scans, with fewer rows."""
    patch = pytest.MonkeyPatch()
    patch.setattr(make_digits, "load_scans", lambda: scans[:200])
    patch.setattr(make_digits, "READING_ROWS", {"train": 40, "validation": 4, "test": 30})
    folder = tmp_path_factory.mktemp("digits")
    make_digits.make_digits(folder)
    make_digits.make_digits(folder / "again")
    patch.undo()
    return folder


def rows_of(folder: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "data" / f"{split}.jsonl").read_text().splitlines()]


def scans_of(row: dict[str, Any]) -> list[int]:
    return [int(number) for number in Path(row["images"][0]).stem.split("-")[1:]]


def shared(splits: dict[str, set[int]]) -> set[int]:
    return {scan for a in splits for b in splits if a < b for scan in splits[a] & splits[b]}


def test_no_scan_is_in_two_splits(scans: list[Any], folder: Path) -> None:
    dealt = {name: {scan.index for scan in group} for name, group in make_digits.split_scans(scans).items()}
    assert {name: len(group) for name, group in dealt.items()} == {"train": 1347, "validation": 91, "test": 359}
    assert set().union(*dealt.values()) == set(range(1797))
    assert shared(dealt) == set()
    used = {name: {scan for row in rows_of(folder, name) for scan in scans_of(row)} for name in dealt}
    assert shared(used) == set()
    used["test"].add(next(iter(used["train"])))  # the planted fault: the same look must see it
    assert shared(used) != set()


def test_every_digit_is_in_every_split(scans: list[Any]) -> None:
    for group in make_digits.split_scans(scans).values():
        assert {scan.digit for scan in group} == set(range(10))


def test_answers_are_those_of_the_scans(scans: list[Any], folder: Path) -> None:
    for row in rows_of(folder, "train") + rows_of(folder, "test"):
        digits = [scans[scan].digit for scan in scans_of(row)]
        answer = row["messages"][1]["content"]
        if row["task"] == "reading":
            assert [int(digit) for digit in answer.split()] == digits
            assert len(digits) in (2, 3)
        elif row["task"] == "naming":
            assert [NAMES.index(answer)] == digits
        else:
            assert ["even", "odd"].index(answer) == digits[0] % 2


def test_the_same_seed_writes_the_same_bytes(folder: Path) -> None:
    first, second = (
        {
            path.relative_to(place): path.read_bytes()
            for part in ("data", "model")
            for path in (place / part).rglob("*.*")
        }
        for place in (folder, folder / "again")
    )
    assert first == second


def test_only_training_pictures_are_jittered(scans: list[Any], folder: Path) -> None:
    for question in read_questions(folder / "data" / "test.jsonl", needs_answers=True):
        row = {"images": question.images}
        plain = make_digits.draw([scans[scan] for scan in scans_of(row)], None)
        assert _media(folder).load_image(question.images[0]).convert("L").tobytes() == plain.tobytes()
    changed = 0
    for question in read_questions(folder / "data" / "train.jsonl", needs_answers=True)[:20]:
        plain = make_digits.draw([scans[scan] for scan in scans_of({"images": question.images})], None)
        changed += _media(folder).load_image(question.images[0]).convert("L").tobytes() != plain.tobytes()
    assert changed == 20


def _media(folder: Path) -> Any:
    from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader

    return MediaLoader(folder / "data")


def test_the_model_folder(folder: Path) -> None:
    processor = load_processor(folder / "model")
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder / "model"))
    assert sum(parameter.numel() for parameter in model.parameters()) == 398_016
    assert len(processor.tokenizer) <= model.config.text_config.vocab_size
    row = next(row for row in rows_of(folder, "train") if len(scans_of(row)) == 3)
    questions = read_questions(folder / "data" / "train.jsonl", needs_answers=True)
    question = next(question for question in questions if question.id == row["id"])
    picture = [_media(folder).load_image(question.images[0])]
    encoded = processor(text=["<|image_pad|>"], images=picture, return_tensors="pt")
    assert encoded["input_ids"].tolist() == [[processor.image_token_id] * 3]  # one token a digit
    assert encoded["image_grid_thw"].tolist() == [[1, 2, 6]]


def test_the_configuration_names_what_is_made(folder: Path) -> None:
    path = EXAMPLE / "digits_tiny_config.yaml"
    assert len(path.read_text().splitlines()) <= 40
    config = load_config(path)
    assert (config.warnings, config.unchecked) == ((), ())
    basic = config.arguments.data.dataset_param.basic_parameters
    for name in (basic.dataset, basic.val_dataset, config.arguments.model.model_name_or_path):
        assert (folder / Path(str(name)).relative_to("runs/digits")).exists()
