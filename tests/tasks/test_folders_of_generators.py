"""Each run of a generator asks for the folders that it uses, and says once what is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.runs import losses, mm, train
from tests.helpers.tiny_generator_run import make_tiny_generator_run

pytestmark = pytest.mark.edge("G4")

FEATURES = "data.dataset_param.basic_parameters.features_dir="
ENCODERS = ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generator")
    found = make_tiny_generator_run(folder, training={"train_iters": 2})
    assert mm("extract", found, "--out", folder / "features").code == 0
    return found


def without(yaml: Path, folder: Path, *components: str) -> str:
    """The override that names a copy of the model's folder without some components."""
    shutil.copytree(yaml.parent / "model", folder)
    for name in components:
        shutil.rmtree(folder / name)
    return f"model.model_name_or_path={folder}"


def told(text: str, name: str) -> int:
    return text.count(f"'{name}' is listed in model_index.json, but its folder does not exist")


@pytest.mark.parametrize("name", ["text_encoder_2", "tokenizer", "vae", "scheduler"])
def test_encoding_while_training_asks_for_every_encoder_once(yaml: Path, tmp_path: Path, name: str) -> None:
    model = without(yaml, tmp_path / "model", name)
    for verb in ("check", "train"):
        said = mm(verb, yaml, model)
        assert (said.code, told(said.out + said.err, name)) == (4, 1), verb


def test_a_run_on_features_asks_for_no_encoder_and_is_the_same_run(yaml: Path, tmp_path: Path) -> None:
    features = FEATURES + str(yaml.parent / "features")
    train(yaml, tmp_path / "whole", features)
    model = without(yaml, tmp_path / "model", *ENCODERS)
    assert mm("check", yaml, features, model).code == 0
    said = train(yaml, tmp_path / "bare", features, model)
    assert "lacks text_encoder, text_encoder_2, tokenizer, tokenizer_2, vae" in said
    assert losses(tmp_path / "bare") == losses(tmp_path / "whole")


def test_a_run_on_features_that_samples_asks_for_the_encoders(yaml: Path, tmp_path: Path) -> None:
    model = without(yaml, tmp_path / "model", "vae")
    samples = ("training.sampling.interval=1", "training.sampling.prompts=[a]", f"training.save={tmp_path / 'run'}")
    words = (yaml, FEATURES + str(yaml.parent / "features"), model, *samples)
    said = mm("check", *words)
    assert (said.code, told(said.out, "vae")) == (4, 1)
    assert mm("train", *words).code == 4


def test_features_that_note_no_vae_ask_for_its_configuration(yaml: Path, tmp_path: Path) -> None:
    features = shutil.copytree(yaml.parent / "features", tmp_path / "features")
    description = json.loads((features / "features.json").read_text())
    del description["component_configs"]
    (features / "features.json").write_text(json.dumps(description))
    model = without(yaml, tmp_path / "model", "vae")
    said = mm("check", yaml, FEATURES + str(features), model)
    assert (said.code, told(said.out, "vae")) == (4, 1)
    (tmp_path / "model" / "vae").mkdir()
    shutil.copy(yaml.parent / "model" / "vae" / "config.json", tmp_path / "model" / "vae")
    assert mm("check", yaml, FEATURES + str(features), model).code == 0


def test_extraction_asks_for_every_encoder(yaml: Path, tmp_path: Path) -> None:
    for name in ("vae", "text_encoder_2"):
        model = without(yaml, tmp_path / name, name)
        said = mm("extract", yaml, model, "--out", tmp_path / "out")
        assert (said.code, told(said.out + said.err, name)) == (4, 1)
