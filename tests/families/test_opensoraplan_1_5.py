"""Open-Sora Plan 1.5 against its formulas, written out in fp64: stages of joint attention within sets, the loss of a
run, and the sampler's steps. No library has them."""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file

from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.loss.denoising import noise_of
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.ops.skiparse import SkiparseSets
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.sampling.prompts import Prompt
from mindspeed_mm.fsdp.sampling.sampler import SampleOrder
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.tasks.draw.loading import load_sampler
from mindspeed_mm.tasks.model_source import ModelSource
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers import opensoraplan_reference as reference
from tests.helpers.runs import differing, losses, mm, tensors, train, watched_steps
from tests.helpers.tiny_generator_run import generator_config, make_clips
from tests.helpers.tiny_opensoraplan import JOINT, VAE, make_tiny_opensoraplan_1_5

prepare_for_transformers()
SEED, SIDE, FRAMES, PROMPT = 7, 32, 9, "a red box"
FP64 = ("parallel.fsdp_plan.param_dtype=fp64", "training.adam_fused=false")


def drawn_model() -> Any:
    from mindspeed_mm.fsdp.models.opensoraplan.transformer_1_5 import OpenSoraT2V_v1_5

    model = OpenSoraT2V_v1_5(**JOINT).double().eval()
    make = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=make, dtype=torch.float64) * 0.3
    return model


def found_and_expected() -> tuple[torch.Tensor, torch.Tensor]:
    model = drawn_model()
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x, text, pooled = draw(2, 4, 3, 6, 4), draw(2, 5, JOINT["caption_channels"]), draw(2, 24)
    times, mask = torch.tensor([4.0, 990.0]), torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])
    with torch.no_grad():
        found = model(x, times, text, pooled, encoder_attention_mask=mask, return_dict=False)[0]
    return found, reference.joint_transformer(model.state_dict(), JOINT, x, times, text, mask, pooled)


def test_the_transformer_is_its_formula() -> None:
    """18 tokens: sets are filled up."""
    torch.testing.assert_close(*found_and_expected(), rtol=1e-6, atol=1e-6)


DEAL = SkiparseSets.deal


def test_sets_that_begin_one_token_late_are_seen() -> None:
    def late(self: SkiparseSets, x: torch.Tensor) -> torch.Tensor:
        return DEAL(self, x.roll(1, dims=1) if self.in_runs else x)

    with mock.patch.object(SkiparseSets, "deal", late), pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(*found_and_expected(), rtol=1e-6, atol=1e-6)


def test_stages_begin_unconnected() -> None:
    from mindspeed_mm.fsdp.models.opensoraplan.transformer_1_5 import StageJoint

    joint = StageJoint(6)
    now, before = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    torch.testing.assert_close(joint(torch.cat([now, before], dim=2)), now)


def test_levels_of_the_linear_and_quadratic_schedule() -> None:
    """Half of the steps go down as a thousand (or 250) do, and the rest meet them and end at 0."""
    from mindspeed_mm.fsdp.models.opensoraplan.pipeline import linear_quadratic_levels

    for steps, fine in ((50, 500), (10, 250), (200, 1000)):
        levels = np.append(linear_quadratic_levels(steps), 0.0)
        falls = -np.diff(levels)
        half = steps // 2
        assert levels[0] == 1.0 and len(levels) == steps + 1 and (falls > 0).all()
        np.testing.assert_allclose(falls[: half - 1], 1 / fine)
        np.testing.assert_allclose(levels[half], 1 - half / fine)
        np.testing.assert_allclose(np.diff(falls[half:], 2), 0, atol=1e-12)  # a parabola
    with pytest.raises(ValueError, match="two halves"):
        linear_quadratic_levels(7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, clips and YAML."""
    folder = tmp_path_factory.mktemp("run")
    make_tiny_opensoraplan_1_5(folder / "model")
    make_clips(folder, 2, frames=FRAMES, size=SIDE)
    sizes = {"height": SIDE, "width": SIDE, "num_frames": FRAMES}
    noise = {"shift": "resolution"}
    config = generator_config(folder, sizes, training={"train_iters": 2, "seed": SEED, "diffusion": noise})
    with (folder / "run.yaml").open("w") as file:
        YAML().dump(json.loads(json.dumps(config)), file)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value.double() for key, value in load_file(next(folder.glob("*.safetensors"))).items()}


def caption_features(model: Path, caption: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from transformers import AutoTokenizer, CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel

    tokens = AutoTokenizer.from_pretrained(model / "tokenizer")(caption, return_tensors="pt")
    pooled = CLIPTokenizer.from_pretrained(model / "tokenizer_2")(
        caption, padding="max_length", max_length=77, truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        embeds = T5EncoderModel.from_pretrained(model / "text_encoder").eval()(**tokens)[0]
        second = CLIPTextModelWithProjection.from_pretrained(model / "text_encoder_2").eval()(**pooled)
    return embeds.double(), tokens.attention_mask, second.text_embeds.double()


def scale_and_shift() -> list[torch.Tensor]:
    return [torch.tensor(VAE[name]).double().view(1, -1, 1, 1, 1) for name in ("scale", "shift")]


def loss_by_hand(model: Path, raw: dict[str, Any]) -> float:
    """Mean squared error of ε − x; σ is logit-normal, and shifted by the tokens of a frame, not of the clip."""
    w, vae, found = weights(model / "transformer"), weights(model / "vae"), []
    scale, shift = scale_and_shift()
    for row, sample in enumerate(raw["sample_ids"]):
        pixels = 2 * raw["pixels"][row : row + 1].double() / 255 - 1
        x = (reference.encode(vae, pixels, 1, 3) - shift) * scale
        seed = derive_seed(SEED, raw["epochs"][row], sample)
        chance = np.random.Generator(np.random.Philox(key=seed))
        chance.random()  # whether the caption is dropped
        drawn = 1 / (1 + math.exp(-chance.normal(0.0, 1.0)))
        tokens = (SIDE // 16) ** 2
        by = math.exp(0.5 + (1.15 - 0.5) / (4096 - 256) * (tokens - 256))
        sigma = by * drawn / (1 + (by - 1) * drawn)
        noise = noise_of(seed, x.shape[1:])[None].double()
        time = torch.tensor([1000 * sigma])
        told = caption_features(model, raw["captions"][row])
        said = reference.joint_transformer(w, JOINT, (1 - sigma) * x + sigma * noise, time, *told)
        found.append(float((said - (noise - x)).square().mean()))
    return float(np.mean(found))


def test_training_learns_the_formulas_loss(folder: Path, tmp_path: Path) -> None:
    raw: list[dict[str, Any]] = []
    with watched_steps(lambda _, batches: raw.extend(batches)), keeping_double():
        train(folder / "run.yaml", tmp_path / "raw", "training.train_iters=1", *FP64)
    assert losses(tmp_path / "raw")[1] == pytest.approx(loss_by_hand(folder / "model", raw[0]), rel=1e-4)


@pytest.mark.slow
def test_a_run_goes_on_and_is_exported_under_the_released_names(folder: Path, tmp_path: Path) -> None:
    train(folder / "run.yaml", tmp_path / "whole")
    train(folder / "run.yaml", tmp_path / "parts", "training.train_iters=1")
    train(folder / "run.yaml", tmp_path / "parts")
    assert differing(tensors(tmp_path / "whole"), tensors(tmp_path / "parts")) == []
    said = mm("export", tmp_path / "parts", tmp_path / "exported")
    assert said.code == 0, said.err
    found, trained = weights(tmp_path / "exported/transformer"), tensors(tmp_path / "whole")
    assert found.keys() == weights(folder / "model/transformer").keys()
    assert all(torch.equal(found[key], trained[f"model.{key}"].double()) for key in found)


@pytest.mark.parametrize("is_quadratic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_samples_are_those_of_the_samplers_formula(is_quadratic: bool, folder: Path, tmp_path: Path) -> None:
    model = folder / "model"
    if is_quadratic:
        model = tmp_path / "model"
        make_tiny_opensoraplan_1_5(model, linear_quadratic=True)
    sampler = load_sampler(find_adapter(model), ModelSource(model), torch.device("cpu"))
    steps, scale = 4, 2.5
    sampling = SamplingArguments(
        num_inference_steps=steps, guidance_scale=scale, height=SIDE, width=SIDE, num_frames=FRAMES, fps=8.0
    )
    prompt = Prompt(0, PROMPT, "here")
    ((made,),) = sampler.sample([prompt], sampling)
    x = sampler.noise(SampleOrder(prompt, 0), sampling.seed, MediaSize(FRAMES, SIDE, SIDE))[None].double()
    levels = [7 * (1 - n / steps) / (1 + 6 * (1 - n / steps)) for n in range(steps + 1)]
    if is_quadratic:  # 1 − n / 250, and a parabola from 1 − 2 / 250 to 0 that begins as steep as the line ends
        first = 1 / 250
        rest = (1 - 2 * first - 2 * first) / 4
        levels = [1.0, 1 - first, 1 - 2 * first, 1 - 2 * first - first - rest, 0.0]
    w = weights(model / "transformer")
    for now, following in pairwise(levels):
        said = []
        for text in (PROMPT, ""):
            told = caption_features(model, text)
            said.append(reference.joint_transformer(w, JOINT, x, torch.tensor([1000 * now]), *told))
        guided = said[1] + scale * (said[0] - said[1])
        guided = 0.7 * guided * said[0].std() / guided.std() + 0.3 * guided
        x = x + (following - now) * guided
    by, shift = scale_and_shift()
    frames = reference.decode(weights(model / "vae"), x / by + shift, 1, 3, 4, 1)
    expected = ((frames[0] / 2 + 0.5).clamp(0, 1) * 255).round().permute(1, 2, 3, 0).numpy()
    assert np.abs(expected - made.frames).max() <= 1 and np.ptp(made.frames) > 10


def test_samples_are_not_spread_over_ranks(folder: Path) -> None:
    said = mm("check", folder / "run.yaml", "parallel.ulysses_parallel_size=2", "--nproc", 2)
    assert said.code != 0 and "a caption attends within every set" in said.err + said.out
