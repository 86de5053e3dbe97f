"""The example of a BAGEL that reads, draws and edits digits: its rows ask for what their answers show, of scans that
are not trained on; the judge sees what is wrong."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

EXAMPLE = Path(__file__).parents[2] / "examples" / "bagel_digits"
if str(EXAMPLE) not in sys.path:
    sys.path.append(str(EXAMPLE))

import edits_of_digits  # noqa: E402
import judge_bagel_digits  # noqa: E402
import make_bagel_digits  # noqa: E402
import small_bagel  # noqa: E402
from edits_of_digits import DRAW, INVERT, MAKE, READ, TASKS, TURN  # noqa: E402
from judge_bagel_digits import Answered  # noqa: E402
from judges import Judges, stacked, train_judges  # noqa: E402
from scans import NAMES, load_scans, split_scans  # noqa: E402

from tests.helpers.runs import mm  # noqa: E402

CONFIG = EXAMPLE / "bagel_digits_config.yaml"


def rows_of(folder: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """The example from 200 scans, of the test's own."""
    return Path(shutil.copytree(made, tmp_path / "bagel_digits"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, once."""
    folder = tmp_path_factory.mktemp("bagel_digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_bagel_digits, "load_scans", lambda: load_scans()[:200])
        patch.setattr(make_bagel_digits, "DRAWS", 2)
        make_bagel_digits.make_data(folder / "data")
    small_bagel.write_model_folder(folder / "model", make_bagel_digits.texts_of(folder / "data"))
    return folder


@pytest.fixture(scope="module")
def judges() -> Judges:
    return train_judges(*stacked(split_scans(load_scans())["judge"]))


def picture_of(folder: Path, name: object) -> np.ndarray:
    return np.asarray(Image.open(folder / str(name)))


def test_rows_ask_for_what_their_answers_show(folder: Path) -> None:
    data, scans = folder / "data", load_scans()
    seen = set()
    for task in TASKS:
        rows = rows_of(data, task)
        assert {row["task"] for row in rows} == {task}
        for row in rows:
            question, answer = (message["content"] for message in row["messages"])  # type: ignore[attr-defined]
            pictures = [picture_of(data, image) for image in row["images"]]  # type: ignore[attr-defined]
            numbers = [int(Path(image).stem.split("-")[0]) for image in row["images"]]  # type: ignore[attr-defined]
            seen |= set(numbers)
            assert question.count("<image>") + (answer == "<image>") == len(pictures)
            if row["task"] == READ:
                assert answer == NAMES[scans[numbers[0]].digit]
            elif row["task"] in (DRAW, MAKE):
                assert question.split()[-1] == NAMES[scans[numbers[-1]].digit]
                on_black = (
                    pictures[-1] if edits_of_digits.papers_of(pictures[-1][None]) == ["black"] else 255 - pictures[-1]
                )
                assert np.array_equal(on_black, scans[numbers[-1]].picture)
            else:
                right = 255 - pictures[0] if row["task"] == INVERT else pictures[0][::-1]
                assert np.array_equal(pictures[1], right) and len(set(numbers)) == 1
    asked = {Path(image).stem.split("-")[0] for row in rows_of(data, "asked") for image in row["images"]}  # type: ignore[attr-defined]
    assert len(seen) == 140 and not seen & set(map(int, asked))


def perfect(folder: Path) -> Iterator[Answered]:
    """The rows of `asked.jsonl`, answered by their own answers."""
    for row in rows_of(folder / "data", "asked"):
        pictures = [picture_of(folder / "data", image) for image in row["images"]]  # type: ignore[attr-defined]
        draws, digit = row["task"] != READ, str(row["digit"])
        truth = pictures[-1] if draws else None
        source = None if row["task"] == DRAW else pictures[0]
        said = "<image>" if draws else digit
        yield Answered(str(row["id"]), str(row["task"]), "", digit, said, source, truth, truth, "")


def share_right(answered: list[Answered], judges: Judges) -> dict[str, float]:
    problems = judge_bagel_digits.problems_of(answered, judges)
    found: dict[str, list[bool]] = {task: [] for task in TASKS}
    for each, wrong in zip(answered, problems, strict=True):
        found[each.task].append(not wrong)
    return {task: float(np.mean(right)) for task, right in found.items()}


def test_the_judge_sees_what_is_wrong(folder: Path, judges: Judges) -> None:
    right = list(perfect(folder))
    share = share_right(right, judges)
    assert share[READ] == share[INVERT] == share[TURN] == 1 and min(share[DRAW], share[MAKE]) >= 0.8, share
    exchanged = [replace(each, expected=NAMES[(NAMES.index(each.expected) + 1) % 10]) for each in right]
    share = share_right(exchanged, judges)
    assert share[READ] == share[DRAW] == share[MAKE] == 0, share
    share = share_right([replace(each, drawn=each.source) for each in right], judges)  # nothing was edited
    assert share[DRAW] == share[MAKE] == share[INVERT] == share[TURN] == 0, share
    swapped = [replace(each, drawn=None if each.drawn is None else 255 - each.drawn) for each in right]
    assert share_right(swapped, judges) == {READ: 1, DRAW: 0, MAKE: 0, INVERT: 0, TURN: 0}  # the other paper
    shifted = [replace(each, drawn=other.drawn) for each, other in zip(right, right[1:] + right[:1], strict=True)]
    share = share_right(shifted, judges)
    assert share[INVERT] == share[TURN] == 0, share  # another source's picture is not the own one
    draw = np.random.default_rng(0)
    noise = [replace(each, said="", drawn=draw.integers(0, 256, (8, 8)).astype(np.uint8)) for each in right]
    assert max(share_right(noise, judges).values()) <= 0.1
    for ink, reached in ((0.9, 1), (0.5, 0)):  # a little too faint is close; much is not, though nearest to its own
        faint = [replace(each, drawn=(each.drawn * ink).astype(np.uint8)) for each in right if each.drawn is not None]
        assert share_right([*right[:1], *faint], judges)[TURN] == reached


def test_one_memorised_picture_of_each_digit_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    scans = split_scans(load_scans())["judge"]
    pictures, digits = stacked(scans)
    first = np.stack([pictures[digits.index(digit)] for digit in digits])
    assert judge_bagel_digits.check_variety(first, digits, scans) == 1
    assert "vary less" in capsys.readouterr().err
    pictures, digits = stacked(scans[::2])
    assert judge_bagel_digits.check_variety(pictures, digits, scans) == 0


def overrides(folder: Path) -> list[str]:
    """The configuration for another folder than its own."""
    basic = "data.dataset_param.basic_parameters"
    sources = ", ".join(f"{{path: {folder}/data/{name}.jsonl, name: {name}}}" for name in TASKS)
    return [
        f"model.model_name_or_path={folder / 'model'}",
        f"{basic}.dataset=[{sources}]",
        f"{basic}.val_dataset={folder / 'data' / 'validation.jsonl'}",
        f"{basic}.dataset_dir={folder / 'data'}",
        f"training.save={folder / 'run'}",
    ]


@pytest.mark.slow
def test_two_steps_of_the_whole_road(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, of_task = rows_of(folder / "data", "asked"), 4
    kept = [row for task in TASKS for row in [each for each in asked if each["task"] == task][:of_task]]
    (folder / "data" / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    few = ["training.train_iters=2", "training.micro_batch_size=8", "training.val_interval=0",
           "data.dataloader_param.num_workers=0"]  # fmt: skip
    said = mm("train", CONFIG, *overrides(folder), *few)
    assert said.code == 0, said.err
    said = mm("infer", folder / "run", "--data", folder / "data" / "asked.jsonl", "--out", folder / "answers.jsonl",
              "--size", "8x8", "--steps", 2, "--max-new-tokens", 2)  # fmt: skip
    assert said.code == 0, said.err
    assert judge_bagel_digits.judge(folder) == 1  # two steps teach nothing, and the judges say so
    missed = capsys.readouterr().err
    assert all(f"goal missed: {task} below" in missed for task in TASKS), missed
    results = json.loads((folder / "run" / "eval" / "results.json").read_text())
    assert results["overall"]["n"] == of_task * len(TASKS)
    assert mm("report", folder / "run").code == 0
