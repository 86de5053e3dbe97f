"""`mm posttrain score`: the rewards of a configuration on samples of a file."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.fsdp.loss.flow_pair_objective import ScoreHistogram
from tests.helpers.runs import lines, mm

REWARDS = """
posttrain:
  rewards:
    - {name: jpeg_size, weight: 2}
"""


def kilobytes(path: Path) -> float:
    stream = io.BytesIO()
    Image.open(path).save(stream, format="JPEG", quality=95)
    return stream.tell() / 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(REWARDS)
    for name, spread in (("a", 2), ("b", 256), ("c", 40)):
        pixels = np.random.default_rng(0).integers(0, spread, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    rows = [{"captions": "a box", "file": "a.png", "file_rejected": "b.png"}, {"prompt": "a line", "file": "c.png"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_pictures_are_scored(folder: Path) -> None:
    words = ("--out", folder / "scores.jsonl", "--histogram", folder / "histogram.json", "--json")
    said = mm("posttrain", "score", folder / "run.yaml", folder / "rows.jsonl", *words)
    assert said.code == 0, said.err
    sizes = {name: kilobytes(folder / f"{name}.png") for name in "abc"}
    first, second = lines(folder / "scores.jsonl")
    assert first["file"] == "a.png" and first["captions"] == "a box"
    assert (first["score"], first["score_rejected"]) == pytest.approx((-2 * sizes["a"], -2 * sizes["b"]))
    assert first["scores_rejected"] == {"jpeg_size": pytest.approx(-sizes["b"])}
    assert second["score"] == pytest.approx(-2 * sizes["c"]) and "score_rejected" not in second
    told = json.loads(said.out)
    assert told["rows"] == 2 and told["means"]["jpeg_size"] == pytest.approx(-(sizes["a"] + sizes["c"]) / 2)
    histogram = ScoreHistogram.read(folder / "histogram.json")
    assert sum(histogram.counts) == 3 and histogram.probability(first["score"]) == pytest.approx(1 / 3)


def test_texts_are_scored(folder: Path) -> None:
    rows = [
        {"prompt": "1 + 1", "completion": "2", "solution": "2"},
        {"prompt": "2 + 2", "completion": "5", "solution": "4"},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = mm(
        "posttrain", "score", folder / "run.yaml", folder / "rows.jsonl", "--out", folder / "scores.jsonl",
        'posttrain.rewards=[{"name": "exact_match"}]',
    )  # fmt: skip
    assert said.code == 0, said.err
    assert [line["score"] for line in lines(folder / "scores.jsonl")] == [1, 0]


@pytest.mark.parametrize(
    ("out", "histogram", "key", "told"),
    [
        ("rows.jsonl", "histogram.json", "--out", "that this command reads"),
        ("scores.jsonl", "run.yaml", "--histogram", "that this command reads"),
        ("scores.jsonl", "scores.jsonl", "--histogram", "or writes otherwise"),
        ("mine.jsonl", "histogram.json", "--out", "this command did not write"),
        ("scores.jsonl", "mine.jsonl", "--histogram", "this command did not write"),
    ],
)
def test_only_what_it_wrote_is_written_over(folder: Path, out: str, histogram: str, key: str, told: str) -> None:
    (folder / "mine.jsonl").write_text('{"prompt": "a", "score": 1}\n')
    before = {path: path.read_bytes() for path in folder.iterdir()}
    said = mm(
        "posttrain", "score", folder / "run.yaml", folder / "rows.jsonl", "--out", folder / out,
        "--histogram", folder / histogram,
    )  # fmt: skip
    assert said.code == 2 and key in said.err and told in said.err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_its_own_files_are_written_over_but_not_where_they_are_read(folder: Path) -> None:
    words = ("--out", folder / "scores.jsonl", "--histogram", folder / "histogram.json")
    for _ in range(2):
        assert mm("posttrain", "score", folder / "run.yaml", folder / "rows.jsonl", *words).code == 0
    said = mm("posttrain", "score", folder / "run.yaml", folder / "scores.jsonl", *words)
    assert said.code == 2 and "that this command reads" in said.err


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nope.png", "not found. Relative paths start at the folder of ROWS"),
        ("../nope.png", "outside the folder of ROWS"),
    ],
)
def test_a_picture_that_is_not_there_has_its_row(folder: Path, name: str, told: str) -> None:
    rows = [{"prompt": "a", "file": "a.png"}, {"prompt": "b", "file": "b.png", "file_rejected": name}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = mm("posttrain", "score", folder / "run.yaml", folder / "rows.jsonl", "--out", folder / "scores.jsonl")
    assert said.code == 4 and "rows.jsonl:2  file_rejected" in said.err and told in said.err
    assert "dataset_dir" not in said.err and "media_roots" not in said.err


def test_what_cannot_be_scored_is_told(folder: Path) -> None:
    out = folder / "scores.jsonl"
    (folder / "rows.jsonl").write_text('{"prompt": "a"}\n')
    said = mm("posttrain", "score", folder / "run.yaml", folder / "rows.jsonl", "--out", out)
    assert said.code != 0 and "rows.jsonl:1" in said.err and "has no sample to score" in said.err
    said = mm("posttrain", "score", folder / "run.yaml", folder / "rows.jsonl", "--out", out, "posttrain.rewards=[]")
    assert said.code != 0 and "nothing judges" in said.err
    assert not out.exists()
