"""The example of edited digits: its rows ask for what their targets show, on the paper of the source; the judge sees
digit and paper."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_edit"
if str(EXAMPLE) not in sys.path:
    sys.path.append(str(EXAMPLE))

import edits  # noqa: E402
import judge_digits_edit  # noqa: E402
import make_digits_edit  # noqa: E402
from judges import stacked, train_judges  # noqa: E402
from scans import NAMES, Scan, load_scans, split_scans  # noqa: E402

from tests.examples.test_digits_flux import check_configuration  # noqa: E402


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Scan]]:
    return split_scans(load_scans())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example from 200 scans, its data twice."""
    patch = pytest.MonkeyPatch()
    patch.setattr(make_digits_edit, "load_scans", lambda: load_scans()[:200])
    folder = tmp_path_factory.mktemp("digits_edit")
    for place in (folder, folder / "again"):
        make_digits_edit.make_data(place / "data")
    make_digits_edit.write_model_folder(folder / "model")
    patch.undo()
    return folder


def test_rows_keep_the_paper_and_ask_for_the_targets_digit(folder: Path) -> None:
    scans, data = load_scans(), folder / "data"
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    for row in rows:
        (number, paper), (source, papers) = (Path(row[key]).stem.split("-") for key in ("path", "source"))
        assert paper == papers
        assert row["cap"] == f"make it a {NAMES[scans[int(number)].digit]}"
        drawn = np.asarray(Image.open(data / row["source"]))
        assert np.array_equal(edits.on_paper(drawn, paper), scans[int(source)].picture)
    assert {Path(row["path"]).stem.split("-")[1] for row in rows} == set(edits.PAPERS)
    prompts = [json.loads(line) for line in (data / "prompts.jsonl").read_text().splitlines()]
    seen = {Path(row[key]).stem.split("-")[0] for row in rows for key in ("path", "source")}
    assert not seen & {Path(prompt["image"]).stem.split("-")[0] for prompt in prompts}
    assert [prompt["prompt"].split()[-1] for prompt in prompts[:10]] == list(NAMES)


def test_the_same_versions_write_the_same_data(folder: Path) -> None:
    first, second = (
        {path.relative_to(place): path.read_bytes() for path in (place / "data").rglob("*.*")}
        for place in (folder, folder / "again")
    )
    assert first == second
    assert len(first) > 200


def test_the_judge_sees_digit_and_paper(splits: dict[str, list[Scan]]) -> None:
    judges = train_judges(*stacked(splits["judge"]))
    scans = splits["train"][::4]
    papers = [edits.PAPERS[number % 2] for number in range(len(scans))]
    pictures = np.stack([edits.on_paper(scan.picture, paper) for scan, paper in zip(scans, papers, strict=True)])
    digits = [scan.digit for scan in scans]
    right = judge_digits_edit.judge_pictures(judges, pictures, digits, papers)
    assert right.keys() == {"SVC, the digit asked for", "MLP, the digit asked for", "paper of the source"}
    assert all(outcomes.mean() > 0.94 for outcomes in right.values())
    # What is wrong: the other paper; the next digit; a source that was left as it is.
    swapped = judge_digits_edit.judge_pictures(judges, 255 - pictures, digits, papers)
    assert swapped["paper of the source"].mean() < 0.06
    assert swapped["SVC, the digit asked for"].mean() > 0.94
    others = judge_digits_edit.judge_pictures(judges, pictures, [(digit + 1) % 10 for digit in digits], papers)
    assert others["SVC, the digit asked for"].mean() < 0.06


def test_the_configuration_names_what_is_made(folder: Path) -> None:
    check_configuration(EXAMPLE / "digits_edit_config.yaml", "runs/digits_edit", folder)
