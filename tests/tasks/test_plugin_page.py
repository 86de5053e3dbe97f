"""The plugin on the page about generators is a whole family: features, training, adapters, export, and samples that are
plain diffusers'."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.fsdp.utils.register import model_register
from tests.helpers.runs import lines, losses, mm, train
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_generators import FLUX_VAE, TEXT_WIDTH, seeded, t5_config, t5_tokenizer

ROOT = Path(__file__).parents[2]
for folder in (ROOT / "examples", ROOT / "examples" / "digits_flux"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

import judge_digits  # noqa: E402
import make_digits_flux  # noqa: E402
import tiny_flux  # noqa: E402
import word_encoders  # noqa: E402
from quickstart_generation import EXAMPLES, Quickstart  # noqa: E402

PAGE = ROOT / "docs" / "generation.md"
MODULE = "aura_flow_family"


def code() -> str:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (found,) = [block for block in blocks if "AuraFlowAdapter" in block]
    return found


def make_tiny_aura_flow(folder: Path) -> None:
    """A folder by diffusers' own `save_pretrained`."""
    from diffusers import (
        AuraFlowPipeline,
        AuraFlowTransformer2DModel,
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
    )
    from transformers import UMT5Config, UMT5EncoderModel

    t5 = t5_tokenizer()
    transformer = {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_mmdit_layers": 1,
        "num_single_dit_layers": 1, "attention_head_dim": 8, "num_attention_heads": 4,
        "joint_attention_dim": TEXT_WIDTH, "caption_projection_dim": 32, "pos_embed_max_size": 64,
    }  # fmt: skip
    text = {key: value for key, value in t5_config(t5).to_dict().items() if key in UMT5Config().to_dict()}
    AuraFlowPipeline(
        tokenizer=t5,
        text_encoder=seeded(lambda: UMT5EncoderModel(UMT5Config(**text | {"model_type": "umt5"})), 0),
        vae=seeded(lambda: AutoencoderKL(**{**FLUX_VAE, "shift_factor": None}), 1),
        transformer=seeded(lambda: AuraFlowTransformer2DModel(**transformer), 2),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
    ).save_pretrained(folder)


@pytest.fixture
def yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a run with the page's plugin, which is forgotten afterwards."""
    monkeypatch.setattr(model_register, "_entries", dict(model_register.loaded()))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{MODULE}.py").write_text(code(), encoding="utf-8")
    make_tiny_aura_flow(tmp_path / "model")
    sections = {"model": {"model_id": "aura_flow"}, "training": {"plugin": [MODULE], "train_iters": 2}}
    yield make_tiny_generator_run(tmp_path, "flux", **sections)
    sys.modules.pop(MODULE, None)


def test_the_pages_plugin_fits_a_page() -> None:
    assert len(code().strip().splitlines()) <= 60


def test_the_pages_plugin_is_a_whole_family(yaml: Path, tmp_path: Path) -> None:
    assert mm("check", yaml).code == 0
    features = f"data.dataset_param.basic_parameters.features_dir={tmp_path / 'features'}"
    said = mm("extract", yaml, "--out", tmp_path / "features")
    assert said.code == 0, said.err
    train(yaml, tmp_path / "run", features)
    train(yaml, tmp_path / "raw")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "raw"), rel=1e-5)
    train(yaml, tmp_path / "adapters", features, "training.lora.enable=true")
    assert len(losses(tmp_path / "adapters")) == 2
    train(yaml, tmp_path / "scratch", features, "model.train_from_scratch=true")
    assert all(np.isfinite(value) for value in losses(tmp_path / "scratch").values())

    said = mm("export", tmp_path / "run", tmp_path / "exported")
    assert said.code == 0, said.err
    sample = ("--prompt", "a red box", "--size", "16x16", "--steps", 2, "--plugin", MODULE)
    said = mm("infer", tmp_path / "exported", *sample, "--out", tmp_path / "out")
    assert said.code == 0, said.err
    (picture,) = (tmp_path / "out").glob("*.png")
    (entry,) = lines(tmp_path / "out" / "manifest.jsonl")
    assert np.array_equal(np.asarray(Image.open(picture)), by_diffusers(tmp_path / "exported", entry["noise_seed"]))


def by_diffusers(folder: Path, seed: int) -> np.ndarray:
    from diffusers import AuraFlowPipeline

    noise = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(seed))[None]
    pipeline = AuraFlowPipeline.from_pretrained(folder)
    drawn = pipeline(
        "a red box", negative_prompt="", height=16, width=16, num_inference_steps=2, guidance_scale=4.0,
        latents=noise, max_sequence_length=pipeline.tokenizer.model_max_length, output_type="np",
    ).images[0]  # fmt: skip
    return (drawn * 255).round().astype(np.uint8)


def make_aura_flow_of_digits(folder: Path) -> None:
    """An AuraFlow of 1.5 M parameters for the data of examples/digits_flux, its transformer without weights."""
    from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler

    from mindspeed_mm.fsdp.models.diffusion.identity_vae import IdentityVAE

    tokenizer = word_encoders.build_tokenizer(tiny_flux.WORDS, tiny_flux.CAPTION_TOKENS, starts=False)
    pipeline = AuraFlowPipeline(
        tokenizer=tokenizer,
        text_encoder=word_encoders.build_umt5(tokenizer),
        vae=IdentityVAE(latent_channels=1, scaling_factor=1 / tiny_flux.PIXEL_STD),
        transformer=AuraFlowTransformer2DModel(
            sample_size=8, patch_size=2, in_channels=1, out_channels=1, num_mmdit_layers=2, num_single_dit_layers=2,
            attention_head_dim=32, num_attention_heads=4, joint_attention_dim=word_encoders.WIDTH,
            caption_projection_dim=128, pos_embed_max_size=16,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
    )  # fmt: skip
    tiny_flux.save_without_weights(pipeline, folder)


@pytest.mark.slow
def test_the_pages_plugin_learns(yaml: Path, tmp_path: Path) -> None:
    """From scratch, by the settings of examples/digits_flux, to digits of which two judges recognise all (seed 42)."""
    folder, example = tmp_path / "digits_flux", EXAMPLES["digits_flux"]
    make_digits_flux.make_data(folder / "data")
    make_aura_flow_of_digits(folder / "model")
    own = ["model.model_id=aura_flow", f"training.plugin=[{MODULE}]"]
    overrides = [*Quickstart(example, folder).overrides(), *own]
    for words in (
        ["extract", example.config, *overrides],
        ["train", example.config, *overrides, "training.sampling.interval=0"],
        ["infer", folder / "run", "--prompts", folder / "data" / example.prompts, "--out", folder / "samples",
         "--num-samples", 40],
    ):  # fmt: skip
        said = mm(*words)
        assert said.code == 0, said.err
    judge_digits.judge(folder)
    results = json.loads((folder / "run" / "eval" / "results.json").read_text())
    shares = {name: task["accuracy"] for name, task in results["tasks"].items()}
    assert min(shares.values()) >= 0.95, shares


def test_what_the_pages_plugin_leaves_out_is_refused(yaml: Path) -> None:
    said = mm("check", yaml, "parallel.ring_attention_size=2", "--nproc", 2)
    assert said.code != 0
    assert "cannot spread a sample over ranks: its adapter has no sample_plan" in said.err + said.out
