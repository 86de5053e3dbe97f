"""Features belong to the rows, frames and sizes that they were made of; `mm check` and `mm train` compare them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.datasets.generation.sizes import SizeSettings, differences
from mindspeed_mm.fsdp.data.feature_store import open_features
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.trainer import Trainer
from tests.helpers.runs import lines, mm, train
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.tasks.extraction_run import make_run, run

BASIC = "data.dataset_param.basic_parameters"
SIZES = "data.dataset_param.preprocess_parameters"

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of pictures whose features were made; tests change copies of its rows."""
    folder = tmp_path_factory.mktemp("prepared")
    run(make_run(folder))
    return folder


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of clips."""
    folder = tmp_path_factory.mktemp("clips")
    run(make_tiny_generator_run(folder, "t2v"), out=folder / "features")
    return folder


def with_rows(prepared: Path, target: Path, change: Callable[[Rows], Rows]) -> str:
    """The override that names changed rows over the same pictures."""
    rows = change(lines(prepared / "rows.jsonl"))
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{BASIC}.dataset={target}"


def edited(rows: Rows) -> Rows:
    return [*rows[:4], {**rows[4], "cap": "something else"}, *rows[5:]]


CHANGES: dict[str, tuple[Callable[[Rows], Rows], str]] = {
    "edited": (edited, r"rows\.jsonl:5 the caption of 'pictures/4\.png' was '.*', is 'something else'"),
    "removed": (lambda rows: rows[:3] + rows[4:], r"rows\.jsonl:4 the row of 'pictures/3\.png' was removed"),
    "added": (
        lambda rows: [*rows, {"path": "pictures/new.png", "cap": "new"}],
        r"rows\.jsonl:13 the row of 'pictures/new\.png' was added: it has no features",
    ),
    "a column": (
        lambda rows: [{**rows[0], "resolution": {"height": 16, "width": 24}}, *rows[1:]],
        r"rows\.jsonl:1 fields of 'pictures/0\.png' other than its caption have changed",
    ),
    "order": (lambda rows: rows[::-1], "the rows are the same, but in a different order"),
}


@pytest.mark.edge("G1")
@pytest.mark.parametrize("name", CHANGES)
def test_changed_rows_are_refused_by_check_and_by_train(prepared: Path, tmp_path: Path, name: str) -> None:
    change, told = CHANGES[name]
    words = (prepared / "run.yaml", with_rows(prepared, tmp_path / "rows.jsonl", change))
    for said in (mm("check", *words), mm("train", *words, "training.train_iters=1")):
        assert said.code == 4
        text = " ".join((said.out + said.err).split())
        assert text.count("the rows have changed since their features were extracted") == 1
        assert re.search(told, text), text
        assert "--accept-data-change" in text


@pytest.mark.edge("G1")
def test_a_missing_file_of_rows_is_refused_and_features_alone_train(prepared: Path, tmp_path: Path) -> None:
    gone = f"{BASIC}.dataset={tmp_path / 'gone.jsonl'}"
    for verb in ("check", "train"):
        said = mm(verb, prepared / "run.yaml", gone, "training.train_iters=1")
        assert said.code == 4
        assert "gone.jsonl" in said.out + said.err
    assert mm("train", prepared / "run.yaml", f"{BASIC}.dataset=null", "training.train_iters=1").code == 0


@pytest.mark.edge("G1")
def test_a_change_of_rows_is_accepted_by_a_flag_and_said(prepared: Path, tmp_path: Path) -> None:
    words = (prepared / "run.yaml", with_rows(prepared, tmp_path / "rows.jsonl", edited), "--accept-data-change")
    told = "features are used although the rows have changed: rows.jsonl:5  the caption of 'pictures/4.png' was"
    checked, trained = mm("check", *words), mm("train", *words, "training.train_iters=1")
    assert (checked.code, trained.code) == (0, 0)
    assert told in checked.out
    assert told in trained.out


@pytest.mark.edge("G1")
def test_rows_that_were_skipped_and_rows_that_are_not_taken_are_no_change(tmp_path: Path) -> None:
    yaml = make_run(tmp_path)
    (tmp_path / "pictures" / "2.png").write_bytes(b"<html>")  # known before the work
    broken = tmp_path / "pictures" / "5.png"
    broken.write_bytes(broken.read_bytes()[:90])  # found while it is decoded
    allowed = f"{BASIC}.max_bad_fraction=0.5"
    assert run(yaml, allowed).skipped == 2
    for words in ((), (f"{BASIC}.max_samples=6",)):
        assert mm("train", yaml, *words, "training.train_iters=1", "training.micro_batch_size=1").code == 0


@pytest.mark.edge("G1")
def test_validation_rows_are_compared_too(prepared: Path, tmp_path: Path) -> None:
    words = (f"{BASIC}.val_dataset={prepared / 'rows.jsonl'}", f"{BASIC}.val_features_dir={tmp_path / 'validation'}")
    shutil.copytree(prepared / "features", tmp_path / "validation")
    assert mm("check", prepared / "run.yaml", *words).code == 0
    changed = with_rows(prepared, tmp_path / "rows.jsonl", edited).replace(".dataset=", ".val_dataset=")
    said = mm("check", prepared / "run.yaml", changed, words[1])
    assert said.code == 4
    assert "is 'something else'" in said.out


@pytest.mark.edge("G1")
def test_features_of_an_older_version_are_compared_by_medium_and_caption(prepared: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(prepared / "features", tmp_path / "features")
    index = [{k: v for k, v in line.items() if k != "said"} for line in lines(folder / "index.jsonl")]
    (folder / "index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in index))
    words = (prepared / "run.yaml", f"{BASIC}.features_dir={folder}")
    assert mm("check", *words).code == 0
    said = mm("check", *words, with_rows(prepared, tmp_path / "rows.jsonl", edited))
    assert said.code == 4
    assert "is 'something else'" in said.out


@pytest.mark.edge("G2")
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("fps=8", r"fps  was each clip's own, is 8"),
        ("clip_position=middle", r"clip_position  was start, is middle"),
        ("frame_interval=2", r"frame_interval  was 1, is 2"),
        ("short_clips=repeat", r"short_clips  was error, is repeat"),
        ("num_frames=9", r"height  was 5×16×16, is 9×16×16"),
        ("max_cut=0.5", r"max_cut  was 0\.75, is 0\.5"),
    ],
)
def test_every_setting_that_features_depend_on_is_compared(clips: Path, override: str, told: str) -> None:
    features = f"{BASIC}.features_dir={clips / 'features'}"
    assert Trainer(load_with_plugins(clips / "run.yaml", [features]), TrainOptions(dry_run=True)).train() is None
    config = load_with_plugins(clips / "run.yaml", [features, f"{SIZES}.{override}"])
    with pytest.raises(DataError, match=f"other settings(.|\n)*preprocess_parameters.{told}"):
        Trainer(config, TrainOptions(dry_run=True)).train()
    assert mm("check", clips / "run.yaml", features, f"{SIZES}.{override}").code == 4


@pytest.mark.edge("G2")
def test_another_spelling_of_the_same_settings_is_no_change(clips: Path) -> None:
    adapter = find_adapter(clips / "model")
    made_with = SizeSettings.noted(open_features(clips / "features", adapter).preprocessing or {})
    for same in (SizeSettings(buckets=["16x16x5"]), SizeSettings(height=16, width=16, num_frames=[5])):
        assert differences(made_with, same, adapter.geometry) == []
    (other,) = differences(made_with, SizeSettings(buckets=["16x16x5", "32x16x5"]), adapter.geometry)
    assert other.what == "was 5×16×16, is 5×16×16, 5×32×16"


@pytest.mark.edge("G2")
def test_keys_about_clips_do_not_count_for_a_model_of_pictures(prepared: Path) -> None:
    assert mm("check", prepared / "run.yaml", f"{SIZES}.fps=8").code == 0
    (other,) = (
        line for line in mm("check", prepared / "run.yaml", f"{SIZES}.max_cut=0.5").out.split("\n") if "max_cut" in line
    )
    assert "was 0.75, is 0.5" in other


def test_training_on_the_very_rows_goes_on(prepared: Path, tmp_path: Path) -> None:
    train(prepared / "run.yaml", tmp_path / "save", "training.train_iters=1")
