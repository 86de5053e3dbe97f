"""BAGEL's pictures as features: training on them is training on pixels, to the bit; whatever else made them, or is
missing, is told. What the VAE takes while training, and does not take then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.core.batch import LATENT, SEEN
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.models.diffusion.picture_vae import PictureVAE, drawn_from, outline_vae
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.tools.memory_tracker import MemoryTracker
from mindspeed_mm.fsdp.train.memory.forecast import encoding, forecast
from mindspeed_mm.tasks.extract import extract
from tests.helpers import tiny_bagel
from tests.helpers.measured_memory import measured
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


# --- memory -----------------------------------------------------------------------------------------------------------

LARGE = [f"{SIZES}.vae_max_image_size=32", f"{SIZES}.vae_min_image_size=32", "training.micro_batch_size=1"]


def test_what_encoding_takes_is_known_to_the_byte(run: Path) -> None:
    """Without gradients: nothing is kept for a backward pass."""
    vae = PictureVAE(run.parent / "model", 4, 2, torch.device("cpu"), torch.float32)
    pixels = torch.zeros(3, 96, 64, dtype=torch.uint8)
    with MemoryTracker(vae._vae) as tracker:
        vae.posterior(pixels)
    ledger = encoding(outline_vae(run.parent / "model"), (96, 64), torch.float32)
    assert ledger.alive_at(ledger.peak()).total() == tracker.peak().by_category["temporary"]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "phase"), [(32, "backward"), (192, "encoding of pictures")])
def test_the_forecast_has_the_vae(tmp_path: Path, width: int, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a VAE with few features the step is the fullest moment, of one with many the encoding. What is measured lacks
    the decoder, which no operator of a step touches."""
    monkeypatch.setattr(tiny_bagel, "WIDTHS", (width, width))
    yaml = run_of(tmp_path)
    turns = [{"role": "user", "content": "<image>Turn."}, {"role": "assistant", "content": "<image>"}]
    row = json.dumps({"messages": turns, "images": ["0.png", "0.png"]})
    (tmp_path / "rows" / "edit.jsonl").write_text(f"{row}\n{row}\n", encoding="utf-8")
    words = [*LARGE, f"{BASIC}.dataset={tmp_path / 'rows' / 'edit.jsonl'}"]
    real = measured(yaml, words)
    vae = outline_vae(tmp_path / "model").state_dict()
    decoder = sum(4 * tensor.numel() for name, tensor in vae.items() if name.startswith("decoder"))
    assert real.peak is not None
    predicted = forecast(load_config(yaml, words).arguments, real.batches[-1])
    assert predicted.vae == sum(4 * tensor.numel() for tensor in vae.values())
    assert predicted.phase == phase
    assert abs(predicted.peak / (real.peak.total_bytes + decoder) - 1) < 0.03
    of_words = {key: value for key, value in real.batches[-1].items() if not key.startswith("picture_")}
    told = forecast(load_config(yaml, words).arguments, of_words)
    assert told.vae == predicted.vae and "encoding of pictures" in "".join(told.approximations)
    (outcome,) = extract.run(yaml, words, out=tmp_path / "features")
    assert outcome.samples == 1
    words.append(f"{BASIC}.features_dir={tmp_path / 'features'}")
    on_features = measured(yaml, words)
    without = forecast(load_config(yaml, words).arguments, on_features.batches[-1])
    assert (without.vae, without.phase) == (0, "backward") and on_features.peak is not None
    assert abs(without.peak / on_features.peak.total_bytes - 1) < 0.03


@pytest.mark.slow
def test_the_released_size_fits_the_devices_of_its_example(tmp_path: Path) -> None:
    """8 of 64 GB, as the launch of MindSpeed-MM has them, with a pack of 11,520 tokens; FLUX's VAE by its published
    sizes: 84 M parameters."""
    record = json.loads((Path(__file__).parents[2] / "released" / "bagel-7b-mot.json").read_text(encoding="utf-8"))
    (tmp_path / "vae").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(record["config"]))
    (tmp_path / "vae" / "config.json").write_text(json.dumps(FLUX))
    example = Path(__file__).parents[3] / "examples" / "bagel" / "bagel_7B_config.yaml"
    arguments = load_config(example, [f"model.model_name_or_path={tmp_path}"]).arguments
    predicted = forecast(arguments, large_pack(11520), world_size=8, device_type="npu")
    assert predicted.vae == 4 * 83_819_683
    assert 30 * 2**30 < predicted.peak < 0.9 * 64e9
    alone = forecast(arguments, large_pack(11520), world_size=2, device_type="npu")
    assert alone.peak > 64e9


FLUX = {
    "_class_name": "AutoencoderKL", "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2,
    "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
}  # fmt: skip


def large_pack(tokens: int) -> dict[str, Any]:
    """A drawn picture of 1024 × 1024 pixels; one of 980 × 980 that is seen, and an answer."""
    lengths = [64, 4096, 4900, tokens - 64 - 4096 - 4900]
    kinds = torch.tensor([0, LATENT, SEEN, 0]).repeat_interleave(torch.tensor(lengths))[None]
    labels = torch.full((1, tokens), -100)
    labels[0, -lengths[3] :] = 7
    borders = torch.tensor([0, lengths[0] + lengths[1], tokens], dtype=torch.int32)
    return {
        "input_ids": torch.full((1, tokens), 5), "labels": labels, "shift_labels": labels, "token_kinds": kinds,
        "part_ids": torch.tensor([0, -1, 2, 0]).repeat_interleave(torch.tensor(lengths))[None],
        "position_ids": torch.arange(tokens)[None], "cu_seq_lens_q": borders, "cu_seq_lens_k": borders,
        "pixel_values": torch.zeros(4900, 588), "image_grid_thw": torch.tensor([[1, 70, 70]]),
        "picture_pixels": torch.zeros(3 << 20, dtype=torch.uint8), "picture_sizes": torch.tensor([[1024, 1024]]),
        "picture_is_drawn": torch.tensor([True]), "picture_seeds": torch.tensor([1]), "sample_ids": ["a", "b"],
    }  # fmt: skip


def rows_of(run: Path, words: list[str]) -> Any:
    return build_mm_dataset(load_config(run, words).arguments.data.dataset_param)[0]
