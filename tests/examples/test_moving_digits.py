"""The example of clips: its rows are what they say, no scan is in two splits, and a model learns from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/moving_digits"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module; what it finds beside it is forgotten again."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "path", [*sys.path])
    import make_clips

    yield make_clips
    for name in set(sys.modules) - before:
        if name == "make_clips":
            del sys.modules[name]


def centre(frame: np.ndarray) -> tuple[float, float]:
    """Row and column of the mean of a frame's ink."""
    ink = 255.0 - frame[..., 0]
    rows, columns = np.indices(ink.shape)
    return float((rows * ink).sum() / ink.sum()), float((columns * ink).sum() / ink.sum())


@pytest.mark.parametrize(("way", "sign"), [("left", -1), ("right", 1)])
def test_a_digit_goes_where_its_row_says(example: ModuleType, way: str, sign: int) -> None:
    clip = example.draw_clip(example.load_scans()[3].picture, way)
    assert clip.shape == (4, 32, 32, 3)
    places = np.array([centre(frame) for frame in clip])
    assert np.allclose(np.diff(places[:, 1]), [0, 16 * sign, 0])
    assert np.ptp(places[:, 0]) == 0


def test_rows_ask_both_questions_of_every_clip(example: ModuleType, tmp_path: Path) -> None:
    scans = example.load_scans()[:6]
    (tmp_path / "clips" / "test").mkdir(parents=True)
    rows = list(example.rows_of("test", scans, tmp_path))
    assert [row["task"] for row in rows] == ["which digit", "which way"] * 6
    for row, scan in zip(rows[::2], scans, strict=True):
        assert row["messages"][1]["content"] == example.NAMES[scan.digit]
        assert (tmp_path / row["videos"][0]).is_file()
    for row in rows[1::2]:
        assert row["messages"][1]["content"] == Path(row["videos"][0]).stem.split("-")[2]


@pytest.mark.slow
def test_unseen_digits_are_named_and_followed(tmp_path: Path) -> None:
    """The commands of the page, with other folders."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    mm = [sys.executable, "-m", "mindspeed_mm"]
    run, data = "runs/moving_digits/run", "runs/moving_digits/data/test.jsonl"
    for words in (
        [sys.executable, str(FOLDER / "make_clips.py")],
        [*mm, "train", str(FOLDER / "moving_digits_config.yaml")],
        [*mm, "evaluate", run, "--data", data, "--max-new-tokens", "8"],
    ):
        subprocess.run(words, cwd=tmp_path, env=environment, check=True, timeout=1500)
    results = json.loads((tmp_path / run / "eval/results.json").read_text())
    assert results["tasks"].keys() == {"which digit", "which way"}
    assert all(task["accuracy"] >= 0.9 for task in results["tasks"].values()), results["tasks"]
