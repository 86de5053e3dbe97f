"""What is said of captions, declarations and scaling: nothing is cut, left empty or enlarged without a word."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from tests.helpers.runs import lines, mm
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_generators import TEXT_TOKENS
from tests.tasks.extraction_run import run

BASIC = "data.dataset_param.basic_parameters"
SIZES = "data.dataset_param.preprocess_parameters"
LONG = "long " * TEXT_TOKENS


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_generator_run(tmp_path_factory.mktemp("told"), training={"train_iters": 1})


def rows_of(yaml: Path, target: Path, changes: dict[int, dict[str, Any]]) -> str:
    """The override that names the rows with some of them changed."""
    rows = [{"path": row["path"], "cap": "short"} | changes.get(n, {}) for n, row in enumerate(base_rows(yaml))]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{BASIC}.dataset={target}"


def base_rows(yaml: Path) -> list[dict[str, Any]]:
    return lines(yaml.parent / "rows.jsonl")


@pytest.mark.edge("G8")
def test_captions_that_are_cut_or_empty_are_counted_by_extraction_and_told_to_training(
    yaml: Path, tmp_path: Path
) -> None:
    words = rows_of(yaml, tmp_path / "rows.jsonl", {2: {"cap": LONG}, 5: {"cap": ["short", LONG]}, 7: {"cap": " "}})
    with pytest.warns(UserWarning, match=r"1 of 16 rows has an empty caption \(rows.jsonl:8\)"):
        outcome = run(yaml, words, out=tmp_path / "features")
    assert (outcome.cut_captions, outcome.empty_captions) == (2, 1)
    assert "2 samples have a caption that the text encoder did not read to its end" in outcome.sentence()
    counts = {line["place"]: line["cut_captions"] for line in lines(tmp_path / "features" / "index.jsonl")}
    assert {place: count for place, count in counts.items() if count} == {"rows.jsonl:3": 1, "rows.jsonl:6": 1}
    said = mm("train", yaml, words, f"{BASIC}.features_dir={tmp_path / 'features'}")
    assert said.code == 0
    assert "2 of 16 samples have a caption that the text encoder did not read" in said.out
    assert "1 of 16 rows has an empty caption" in said.out


@pytest.mark.edge("G8")
def test_a_caption_that_is_cut_while_training_on_raw_media_is_told_once(yaml: Path, tmp_path: Path) -> None:
    words = rows_of(yaml, tmp_path / "rows.jsonl", {number: {"cap": LONG} for number in range(16)})
    said = mm("train", yaml, words, "training.train_iters=3")
    assert said.code == 0
    assert said.out.count("the text encoder reads") == 1
    assert f"the text encoder reads {TEXT_TOKENS} tokens" in said.out


@pytest.mark.edge("G8")
def test_a_false_declaration_that_changes_the_size_makes_a_bad_sample_everywhere(yaml: Path, tmp_path: Path) -> None:
    buckets = [f"{SIZES}.{each}" for each in ("height=null", "width=null", "buckets=[16x16,16x32]")]
    changes = {1: {"resolution": {"height": 160, "width": 320}}, 3: {"resolution": {"height": 17, "width": 16}}}
    words = (rows_of(yaml, tmp_path / "rows.jsonl", changes), *buckets)
    told = "the row declares height 160, the file has 16; width 320, the file has 16: it is a sample of 16×16, not of"
    outcome = run(yaml, *words, out=tmp_path / "features")
    assert outcome.skipped == 1
    (skipped,) = lines(tmp_path / "features" / "skipped.jsonl")
    assert skipped["place"] == "rows.jsonl:2"
    assert told in skipped["reason"]
    said = mm("train", yaml, *words, "training.train_iters=20")
    assert said.code == 4
    assert told in " ".join(said.err.split())


def dataset_of(yaml: Path, *words: str) -> Any:
    param: DatasetParam = load_with_plugins(yaml, words).arguments.data.dataset_param
    return build_mm_dataset(param)[0]


@pytest.mark.edge("G9")
def test_scaling_is_told_and_limited_by_keys(yaml: Path, tmp_path: Path) -> None:
    """A picture of 4 × 4 is enlarged 4 times, one of 16 × 64 loses three quarters."""
    for name, (height, width) in {"small": (4, 4), "wide": (16, 64)}.items():
        Image.fromarray(np.zeros((height, width, 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")
    rows = [{"path": f"{name}.png", "cap": "a"} for name in ("small", "wide")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (f"{BASIC}.dataset={tmp_path / 'rows.jsonl'}", f"{BASIC}.dataset_dir={tmp_path}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(dataset_of(yaml, *words)) == 2
    told = [str(each.message) for each in caught]
    assert any("1 of 2 media is enlarged more than 2 times along a side, rows.jsonl:1 most" in text for text in told)
    assert any("1 of 2 media loses more than a third of the area, rows.jsonl:2 most of all, 75%" in t for t in told)
    lenient = (*words, f"{BASIC}.on_bad_sample=skip", f"{BASIC}.max_bad_fraction=0.5")
    for limit, place in (("max_enlargement=3.9", "rows.jsonl:1"), ("max_cut=0.74", "rows.jsonl:2")):
        assert list(dataset_of(yaml, *lenient, f"{SIZES}.{limit}").left_out) == [place]
    for limit in ("max_enlargement=4", "max_cut=0.75"):
        assert len(dataset_of(yaml, *words, f"{SIZES}.{limit}")) == 2
    said = mm("check", yaml, *words, f"{SIZES}.max_enlargement=0.5", f"{SIZES}.max_cut=2")
    assert said.code != 0
    assert "0.5 is not a number from 1 on" in said.out
    assert "2.0 is not a share from 0 to 1" in said.out


def test_columns_that_another_task_would_read_are_told(yaml: Path, tmp_path: Path) -> None:
    further = {"source": "pictures/1.png", "source_2": "pictures/2.png", "mask": "none"}
    words = rows_of(yaml, tmp_path / "rows.jsonl", {2: further, 3: further})
    note = "2 of 16 rows have columns source, source_2, as other tasks call their media; this task does not read them"
    with pytest.warns(UserWarning, match=note):
        assert mm("check", yaml, words).code == 0
