"""A generator's run through `mm train`: its loss is the paper's formula over diffusers' own models; features and raw
media are the same run; pieces are the whole; validation says the same of the same weights."""

from __future__ import annotations

import inspect
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.loss.denoising import noise_of
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import differing, lines, losses, mm, newest, tensors, train, watched_steps
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_run import make_tiny_run

FAMILIES = ("flux", "t2v", "i2v")
FEATURES = "data.dataset_param.basic_parameters.features_dir="
UNCHANGED = (
    "training.train_iters=3",
    "training.val_interval=1",
    "data.dataset_param.basic_parameters.val_rate=0.25",
    "training.lr=1e-30",
    "training.lr_decay_style=constant",
)
"""Steps that leave the weights as they are, each validated."""


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("generators")
    training = {"save_interval": 100, "lr_decay_style": "cosine", "ema": {"enable": True, "decay": 0.9}}
    return {family: make_tiny_generator_run(folder / family, family, training=training) for family in FAMILIES}


@pytest.fixture(scope="module")
def features(yamls: dict[str, Path]) -> dict[str, Path]:
    for yaml in yamls.values():
        said = mm("extract", yaml, "--out", yaml.parent / "features")
        assert said.code == 0, said.err
    return {family: yaml.parent / "features" for family, yaml in yamls.items()}


@pytest.fixture(scope="module")
def whole(yamls: dict[str, Path], features: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("whole") / "save"
    with watched_steps() as seen:
        train(yamls["flux"], save, FEATURES + str(features["flux"]), "training.train_iters=11")
    (save / "order.json").write_text(json.dumps(seen))
    return save


@pytest.mark.parametrize("family", FAMILIES)
def test_raw_media_and_features_are_the_same_run(
    family: str, yamls: dict[str, Path], features: dict[str, Path], tmp_path: Path
) -> None:
    words = ("training.train_iters=3",)
    with watched_steps() as raw:
        train(yamls[family], tmp_path / "raw", *words)
    with watched_steps() as extracted:
        train(yamls[family], tmp_path / "features", *words, FEATURES + str(features[family]))
    assert raw == extracted
    expected = losses(tmp_path / "raw")
    assert losses(tmp_path / "features") == pytest.approx(expected, rel=1e-5)
    assert len({round(loss, 3) for loss in expected.values()}) == 3  # the steps are different ones


def test_loss_is_the_formula_over_diffusers_own_models(yamls: dict[str, Path], tmp_path: Path) -> None:
    """Nothing of ours but the seeds: latents, text and prediction come from diffusers, as its own pipeline has them."""
    yaml, seen = yamls["flux"], []
    with watched_steps(lambda engine, batches: seen.extend(batches)):
        train(yaml, tmp_path, "training.train_iters=1", "training.diffusion.caption_dropout=0.3")
    (batch,) = seen
    values = [flux_loss(yaml.parent / "model", batch, row) for row in range(len(batch["sample_ids"]))]
    assert losses(tmp_path)[1] == pytest.approx(float(np.mean(values)), rel=2e-5)


@torch.no_grad()
def flux_loss(model: Path, batch: dict[str, Any], row: int) -> float:
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(model, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    seed = derive_seed(7, batch["epochs"][row], batch["sample_ids"][row])
    chance = np.random.Generator(np.random.Philox(key=seed))
    caption = "" if chance.random() < 0.3 else batch["captions"][row]
    sigma = 1 / (1 + math.exp(-chance.normal(0.0, 1.0)))
    scheduler = pipeline.scheduler.config
    slope = (scheduler.max_shift - scheduler.base_shift) / (scheduler.max_image_seq_len - scheduler.base_image_seq_len)
    images = pipeline.image_processor.preprocess(batch["pixels"][row, :, 0].float()[None] / 255)
    latents = pipeline.vae.encode(images).latent_dist.mode()
    latents = (latents - pipeline.vae.config.shift_factor) * pipeline.vae.config.scaling_factor
    _, channels, height, width = latents.shape
    tokens = (height // 2) * (width // 2)
    shift = math.exp(scheduler.base_shift + slope * (tokens - scheduler.base_image_seq_len))
    sigma = shift * sigma / (1 + (shift - 1) * sigma)
    noise = noise_of(seed, latents.shape[1:])[None]
    length = pipeline.tokenizer_2.model_max_length
    embeds, pooled, text_ids = pipeline.encode_prompt(caption, None, max_sequence_length=length)

    def packed(tensor: torch.Tensor) -> torch.Tensor:
        return pipeline._pack_latents(tensor, 1, channels, height, width)

    predicted = pipeline.transformer(
        hidden_states=packed((1 - sigma) * latents + sigma * noise),
        timestep=torch.tensor([sigma]),
        guidance=torch.tensor([3.5]) if pipeline.transformer.config.guidance_embeds else None,
        encoder_hidden_states=embeds,
        pooled_projections=pooled,
        txt_ids=text_ids,
        img_ids=pipeline._prepare_latent_image_ids(1, height // 2, width // 2, "cpu", torch.float32),
        return_dict=False,
    )[0]
    return float((predicted - packed(noise - latents)).square().mean())


WAYS = {
    "in this process": (),
    "two workers": ("data.dataloader_param.num_workers=2",),
    "validation and samples in between": (
        "training.val_interval=2",
        "training.sampling.interval=3",
        "training.sampling.prompts=[a red box]",
        "training.sampling.num_inference_steps=2",
        "training.sampling.height=16",
        "training.sampling.width=16",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_pieces_equal_the_whole(
    way: str, yamls: dict[str, Path], features: dict[str, Path], whole: Path, tmp_path: Path
) -> None:
    words = [FEATURES + str(features["flux"]), "training.train_iters=11", *WAYS[way]]
    if way.startswith("validation"):
        words += ["data.val_dataset_param.dataset_type=generation"]
        words += [f"data.val_dataset_param.basic_parameters.features_dir={features['flux']}"]
    with watched_steps() as seen:
        for steps in (3, 6, 11):  # in the middle of the first epoch, in the middle of the second, to the end
            train(yamls["flux"], tmp_path, "--steps", steps, *words)
    assert seen == json.loads((whole / "order.json").read_text())
    assert losses(tmp_path) == losses(whole)
    assert newest(tmp_path) == 11
    assert differing(tensors(tmp_path), tensors(whole)) == []
    assert any(name.startswith("ema.") for name in tensors(whole))


def test_validation_says_the_same_of_the_same_weights(
    yamls: dict[str, Path], features: dict[str, Path], tmp_path: Path
) -> None:
    """To the bit, whatever was trained on in between, and after a resume."""
    words = [FEATURES + str(features["t2v"]), *UNCHANGED]
    train(yamls["t2v"], tmp_path / "whole", *words)
    found = validation_losses(tmp_path / "whole")
    assert len(found) == 3 and len(set(found)) == 1
    assert len(set(losses(tmp_path / "whole").values())) == 3
    for steps in (1, 3):
        train(yamls["t2v"], tmp_path / "pieces", "--steps", steps, *words)
    assert validation_losses(tmp_path / "pieces") == found


def test_validation_says_the_same_on_two_ranks(
    yamls: dict[str, Path], features: dict[str, Path], tmp_path: Path
) -> None:
    """Every sample has the noise that it has on one: in fp64 nothing but the order of the sum is another."""
    words = (FEATURES + str(features["t2v"]), *UNCHANGED, "parallel.fsdp_plan.param_dtype=fp64")
    train(yamls["t2v"], tmp_path / "one", *words, "training.gradient_accumulation_steps=2")
    run_ranks(2, train, yamls["t2v"], tmp_path / "two", *words)
    (one, *_), found = validation_losses(tmp_path / "one"), validation_losses(tmp_path / "two")
    assert len(found) == 3 and len(set(found)) == 1
    assert found[0] == pytest.approx(one, rel=1e-12)


def validation_losses(save: Path) -> list[float]:
    return [line["val_loss"] for line in lines(save / "metrics.jsonl") if "val_loss" in line]


def test_validation_is_of_the_average(yamls: dict[str, Path], features: dict[str, Path], tmp_path: Path) -> None:
    found = {}
    for use in ("true", "false"):
        words = [FEATURES + str(features["flux"]), "training.val_interval=4", "training.train_iters=4"]
        words += ["data.dataset_param.basic_parameters.val_rate=0.25", f"training.ema.use_for_evaluation={use}"]
        train(yamls["flux"], tmp_path / use, *words)
        found[use] = validation_losses(tmp_path / use)
    assert found["true"] != found["false"]
    assert losses(tmp_path / "true") == losses(tmp_path / "false")


def test_the_average_is_of_the_weights_after_every_step(
    yamls: dict[str, Path], features: dict[str, Path], tmp_path: Path
) -> None:
    words = [FEATURES + str(features["flux"]), "training.train_iters=3", "training.save_interval=1"]
    train(yamls["flux"], tmp_path, *words, "training.ema.warmup=false", "training.save_total_limit=null")
    steps = [tensors(tmp_path, step) for step in (1, 2, 3)]
    averages = [name for name in steps[0] if name.startswith("ema.")]
    assert averages
    for name in averages:
        expected = steps[0][name].double()
        for step in steps[1:]:
            expected = 0.9 * expected + 0.1 * step[name.replace("ema.", "model.", 1)].double()
        torch.testing.assert_close(steps[2][name].double(), expected, rtol=1e-6, atol=1e-8)


def test_adapters_in_pieces_equal_the_whole(yamls: dict[str, Path], features: dict[str, Path], tmp_path: Path) -> None:
    words = [FEATURES + str(features["t2v"]), "training.lora.enable=true", "training.lora.dropout=0.1"]
    train(yamls["t2v"], tmp_path / "whole", *words)
    for steps in (2, 6):
        train(yamls["t2v"], tmp_path / "pieces", "--steps", steps, *words)
    assert losses(tmp_path / "pieces") == losses(tmp_path / "whole")
    kept = tensors(tmp_path / "whole")
    assert differing(tensors(tmp_path / "pieces"), kept) == []
    assert all("lora_" in name for name in kept if name.startswith("model."))


def test_losses_of_language_models_are_refused(yamls: dict[str, Path]) -> None:
    said = mm("train", yamls["flux"], "features.loss_cfg.loss_type=per_token_loss")
    assert said.code == 2
    assert "generators learn by denoising" in said.err


def test_features_of_other_weights_are_refused(
    yamls: dict[str, Path], features: dict[str, Path], tmp_path: Path
) -> None:
    from tests.helpers.tiny_generators import make_tiny_flux

    other = make_tiny_flux(tmp_path / "other", seed=1)
    said = mm("train", yamls["flux"], FEATURES + str(features["flux"]), f"model.model_name_or_path={other}")
    assert said.code == 4
    assert "vae" in said.err and "mm extract" in said.err


def test_the_data_know_what_the_yaml_changes_of_the_model(yamls: dict[str, Path]) -> None:
    said = mm("check", yamls["t2v"], "model.transformer.patch_size=[1,4,4]")
    assert said.code == 4
    assert "multiples of 32" in said.out + said.err


def test_a_language_model_has_no_transformer_to_change(tmp_path: Path) -> None:
    said = mm("check", make_tiny_run(tmp_path), "model.transformer.patch_size=[1,4,4]")
    assert said.code == 2
    assert "changes the transformer of a generator" in said.out + said.err


def test_check_misses_weights_that_are_not_there(yamls: dict[str, Path], tmp_path: Path) -> None:
    model = shutil.copytree(yamls["flux"].parent / "model", tmp_path / "model")
    for weights in (model / "transformer").glob("*.safetensors"):
        weights.rename(weights.with_suffix(".bin"))
    said = mm("check", yamls["flux"], f"model.model_name_or_path={model}")
    assert said.code == 4
    assert str(model / "transformer") in said.out + said.err
    assert mm("check", yamls["flux"], f"model.model_name_or_path={model}", "model.train_from_scratch=true").code == 0


def test_timesteps_reach_the_transformer_unrounded(
    yamls: dict[str, Path], features: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharding in bf16 casts what a model is given, and bf16 has no 999: timesteps are left alone."""
    from diffusers import WanTransformer3DModel

    seen, real = [], WanTransformer3DModel.forward

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((kwargs["hidden_states"].dtype, kwargs["timestep"].dtype))
        return real(self, *args, **kwargs)

    watched.__signature__ = inspect.signature(real)  # type: ignore[attr-defined]
    monkeypatch.setattr(WanTransformer3DModel, "forward", watched)
    words = ["parallel.fsdp_plan.param_dtype=bf16", "training.train_iters=1"]
    train(yamls["t2v"], None, FEATURES + str(features["t2v"]), *words)
    assert seen == [(torch.bfloat16, torch.float32)]


@pytest.mark.edge("G10")
def test_a_run_goes_on_with_another_split_of_its_batch(
    yamls: dict[str, Path], features: dict[str, Path], tmp_path: Path
) -> None:
    """All pictures have one size: every step of 4 samples is the same however it is dealt."""
    words = [FEATURES + str(features["flux"]), "training.train_iters=5"]
    as_saved = ["training.micro_batch_size=2", "training.gradient_accumulation_steps=2"]
    train(yamls["flux"], tmp_path / "whole", *words, *as_saved)
    train(yamls["flux"], tmp_path / "parts", *words, *as_saved, "--steps", 2)
    said = train(yamls["flux"], tmp_path / "parts", *words, "training.micro_batch_size=4")
    assert "micro-batches  was" in said
    expected, found = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert found.keys() == expected.keys()
    assert [found[step] for step in expected] == pytest.approx([*expected.values()], rel=2e-6)
