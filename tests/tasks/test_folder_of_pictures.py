"""From a folder of pictures with text files to a trained generator, with no more said than must be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fsdp.data.test_media_folders import captioned
from tests.helpers.runs import lines, losses, mm, train
from tests.helpers.tiny_generators import make_tiny_flux

FIVE_LINES = """\
model: {model_name_or_path: model}
data:
  dataset_param:
    {dataset_type: generation, basic_parameters: {dataset: set}, preprocess_parameters: {max_pixels: 256}}
training: {lr: 1e-3, train_iters: 3, save: run}
"""
CHANGES = (
    "data.dataset_param.basic_parameters.shuffle_tags=true",
    "data.dataset_param.basic_parameters.trigger_word=sks",
    "data.dataset_param.preprocess_parameters.flip=true",
    "data.dataset_param.preprocess_parameters.crop=random",
    "training.diffusion.caption_dropout=0.25",
    "training.train_iters=8",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of kohya, a model, and a YAML of five lines."""
    folder = tmp_path_factory.mktemp("kohya")
    make_tiny_flux(folder / "model")
    captioned(folder / "set" / "3_dog" / "a.png", "a dog, outside, in the rain", seed=1, height=20, width=28)
    captioned(folder / "set" / "3_dog" / "b.png", None, seed=2)
    captioned(folder / "set" / "1_others" / "c.png", "a cat, inside", seed=3, height=16, width=17)
    (folder / "run.yaml").write_text(FIVE_LINES)
    return folder


def test_five_lines_train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert len(FIVE_LINES.splitlines()) == 5
    assert mm("check", "run.yaml").code == 0
    found = json.loads(mm("data", "check", "run.yaml", "--json").out)
    assert (found["rows"], found["usable"], found["bad"]) == (3, 3, 0)
    train("run.yaml", None)
    assert len(losses(folder / "run")) == 3


def test_features_and_raw_media_train_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats, shuffled tags, a trigger word, flips and cuts: drawn alike of features."""
    monkeypatch.chdir(folder)
    features = "data.dataset_param.basic_parameters.features_dir=features"
    said = mm("extract", "run.yaml", features, *CHANGES)
    assert said.code == 0, said.err
    train("run.yaml", "raw", *CHANGES)
    train("run.yaml", "stored", features, *CHANGES)
    raw, stored = (list(losses(folder / name).values()) for name in ("raw", "stored"))
    assert raw == pytest.approx(stored, rel=1e-6)
    assert len(set(raw)) == len(raw)
    other = mm("train", "run.yaml", features, *CHANGES, "data.dataset_param.preprocess_parameters.flip=false")
    assert other.code == 4
    assert "preprocess_parameters.flip" in other.err


MIXED = (
    "data.dataset_param.basic_parameters.dataset=[{path: set/3_dog, name: dog}, {path: set/1_others, name: cats}]",
    "data.dataset_param.basic_parameters.mix.weights={dog: 1, cats: 3}",
    "training.train_iters=8",
)


def test_shares_of_several_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of themselves, an eighth of the samples would be cats; features are drawn as raw media are."""
    monkeypatch.chdir(folder)
    train("run.yaml", "mixed", *MIXED)
    (told,) = [event for event in lines(folder / "mixed" / "events.jsonl") if event["kind"] == "mix"][-1:]
    assert told["shares"] == pytest.approx({"dog": 0.25, "cats": 0.75}, abs=0.2)
    assert told["shares"]["cats"] > 0.5
    stats = json.loads(mm("data", "stats", "run.yaml", *MIXED, "--json").out)
    assert {each["name"]: each["weight"] for each in stats["shares"]} == {"dog": 0.25, "cats": 0.75}
    features = "data.dataset_param.basic_parameters.features_dir=shares"
    assert mm("extract", "run.yaml", features, *MIXED).code == 0
    train("run.yaml", "mixed_features", features, *MIXED)
    assert losses(folder / "mixed_features") == pytest.approx(losses(folder / "mixed"), rel=1e-6)
    other = "data.dataset_param.basic_parameters.mix.weights={dog: 1, cats: 2}"
    said = mm("train", "run.yaml", *MIXED, "training.save=mixed", other, "training.train_iters=9")
    assert said.code != 0 and "mix" in said.err, said.err


def test_a_changed_number_of_repeats_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    features = "data.dataset_param.basic_parameters.features_dir=other"
    assert mm("extract", "run.yaml", features).code == 0
    (folder / "set" / "1_others").rename(folder / "set" / "5_others")
    try:
        said = mm("train", "run.yaml", features)
    finally:
        (folder / "set" / "5_others").rename(folder / "set" / "1_others")
    assert said.code == 4
    assert "1_others" in said.err
