"""BAGEL's pictures as features: training on them is training on pixels, to the bit; whatever else made them, or is
missing, is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.models.diffusion.picture_vae import PictureVAE, drawn_from
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.tasks.extract import extract
from tests.helpers.parity import compare_steps
from tests.helpers.planned_steps import train_steps
from tests.helpers.runs import mm
from tests.helpers.tiny_bagel import picture_bytes, run_of

BASIC = "data.dataset_param.basic_parameters"
SIZES = "data.dataset_param.preprocess_parameters"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML with its model and rows."""
    return run_of(tmp_path_factory.mktemp("bagel"))


@pytest.fixture(scope="module")
def features(run: Path) -> Path:
    """The features of its rows."""
    (outcome,) = extract.run(run, out=run.parent / "features")
    assert (outcome.samples, outcome.skipped) == (4, 0)
    return run.parent / "features"


def keys_of(folder: Path) -> list[str]:
    lines = (folder / "index.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted(json.loads(line)["key"] for line in lines)


def test_training_on_features_is_training_on_pixels(run: Path, features: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise and draws from the posteriors are the same ones; the VAE is not loaded."""
    expected = train_steps(str(run), [], packs=True)
    monkeypatch.delattr(PictureVAE, "__init__")
    compare_steps(expected, train_steps(str(run), [f"{BASIC}.features_dir={features}"], packs=True), 0)


def test_latents_are_drawn_from_a_posterior_by_their_seed() -> None:
    """mean + deviation · noise."""
    posterior = torch.stack([torch.full((3, 40, 40), 2.0), torch.full((3, 40, 40), 0.5)])
    drawn = [drawn_from(posterior, seed) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert abs(float(drawn[0].mean()) - 2) < 0.05 and abs(float(drawn[0].std()) - 0.5) < 0.03


def test_what_is_missing_is_told_and_made(run: Path, features: Path, tmp_path: Path) -> None:
    """A picture that has changed, another size, another VAE."""
    shutil.copytree(run.parent / "rows", tmp_path / "rows")
    shutil.copytree(features, tmp_path / "features")
    words = [f"{BASIC}.dataset={tmp_path}/rows/rows.jsonl", f"{BASIC}.dataset_dir={tmp_path}/rows",
             f"{BASIC}.features_dir={tmp_path}/features"]  # fmt: skip
    assert "picture_posteriors" in rows_of(run, words)[0]
    with pytest.raises(DataError, match="no features of this picture with 4 × 8 pixels"):
        rows_of(run, [*words, f"{SIZES}.vae_max_image_size=8"])[0]
    (tmp_path / "rows" / "1.png").write_bytes(picture_bytes(9, 12, 8))
    with pytest.raises(DataError, match=r"rows\.jsonl:1.*no features of this picture with 8 × 12 pixels"):
        rows_of(run, words)[0]
    (outcome,) = extract.run(run, words)
    assert (outcome.samples, outcome.kept) == (5, 4)
    assert "picture_posteriors" in rows_of(run, words)[0]
    vae = tmp_path / "model"
    shutil.copytree(run.parent / "model", vae)
    with (vae / "ae.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(DataError, match="made by other weights"):
        rows_of(run, [*words, f"model.model_name_or_path={vae}"])


def test_an_extraction_goes_on_where_it_was_killed(run: Path, features: Path, tmp_path: Path) -> None:
    """Batches of two ranks, of which one was not yet done: its number is filled, and the features are the same."""
    stopped = {"calls": 0}
    encode = PictureVAE.posterior

    def until_the_third(self: PictureVAE, pixels: torch.Tensor) -> torch.Tensor:
        stopped["calls"] += 1
        if stopped["calls"] == 4:
            raise KeyboardInterrupt
        return encode(self, pixels)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PictureVAE, "posterior", until_the_third)
        extract.run(run, out=tmp_path / "set", batch_size=1, shard_bytes=1 << 40)
    (tmp_path / "set" / "work" / "batch-000000.safetensors").unlink()
    with pytest.raises(DataError, match="not finished"):
        rows_of(run, [f"{BASIC}.features_dir={tmp_path / 'set'}"])
    (outcome,) = extract.run(run, out=tmp_path / "set", batch_size=1)
    assert outcome.samples == 4 and not (tmp_path / "set" / "work").exists()
    assert keys_of(tmp_path / "set") == keys_of(features)
    own, other = (rows_of(run, [f"{BASIC}.features_dir={folder}"])[2] for folder in (tmp_path / "set", features))
    assert torch.equal(own["picture_posteriors"], other["picture_posteriors"])


def test_a_picture_that_cannot_be_decoded_is_skipped_and_listed(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run.parent / "rows", tmp_path / "rows")
    whole = (tmp_path / "rows" / "2.png").read_bytes()
    (tmp_path / "rows" / "2.png").write_bytes(whole[:60])
    words = [f"{BASIC}.dataset={tmp_path}/rows/rows.jsonl", f"{BASIC}.dataset_dir={tmp_path}/rows",
             f"{BASIC}.max_bad_fraction=1.0"]  # fmt: skip
    (outcome,) = extract.run(run, words, out=tmp_path / "set")
    assert (outcome.samples, outcome.skipped) == (3, 1)
    assert "2.png" in (tmp_path / "set" / "skipped.jsonl").read_text(encoding="utf-8")


def test_other_rows_and_features_are_refused(run: Path, features: Path, tmp_path: Path) -> None:
    section = {"dataset_type": "huggingface", "basic_parameters": {"dataset": str(run.parent / "rows" / "rows.jsonl")}}
    model = {"model_id": "bagel", "model_name_or_path": str(run.parent / "model")}
    (tmp_path / "words.yaml").write_text(json.dumps({"model": model, "data": {"dataset_param": section}}))
    said = mm("extract", tmp_path / "words.yaml", "--out", tmp_path / "set")
    assert said.code != 0 and "Set bagel" in said.err, said.err
    (features / "features.json").rename(tmp_path / "kept.json")
    told = json.loads((tmp_path / "kept.json").read_text(encoding="utf-8"))
    (features / "features.json").write_text(json.dumps(told | {"task": "t2i"}), encoding="utf-8")
    try:
        with pytest.raises(DataError, match="not of pictures in rows"):
            rows_of(run, [f"{BASIC}.features_dir={features}"])
    finally:
        (tmp_path / "kept.json").rename(features / "features.json")


def rows_of(run: Path, words: list[str]) -> Any:
    return build_mm_dataset(load_config(run, words).arguments.data.dataset_param)[0]
