"""Generators that learn from rewards: trajectories are the pipeline's, steps that are trained are those that were
drawn, and a run that is cut into pieces is the whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.fsdp.loss.sde_steps import SdeSteps
from mindspeed_mm.fsdp.models.diffusion.components import diffusers_class, load_encoders, load_pipeline
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.diffusion.latents import pack, unpack
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser, GuidedDenoiser, blank_text
from mindspeed_mm.fsdp.sampling.trajectories import SampleNoise, Trajectories, noise_grid, roll_out
from mindspeed_mm.fsdp.train.rollouts.flow import FlowRollouts
from mindspeed_mm.tasks.posttrain import rollouts
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import differing, lines, mm, tensors, train
from tests.helpers.tiny_rollout_run import PROMPTS, make_tiny_rollout_run

FP64 = {"fsdp_plan": {"param_dtype": "fp64", "reduce_dtype": "fp64"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flow")
    make_tiny_rollout_run(folder)
    return folder


@pytest.mark.parametrize(("shift", "guidance"), [(None, 1.0), (3.0, 1.0), (None, 2.5)])
def test_without_noise_a_trajectory_is_the_pipelines(folder: Path, shift: float | None, guidance: float) -> None:
    """FLUX by diffusers, from the same noise, with guidance as without; a shift of its own is another grid."""
    adapter = find_adapter(folder / "model")
    encoders = load_encoders(adapter, torch.device("cpu"))
    model = diffusers_class(adapter.transformer_class).from_pretrained(folder / "model" / "transformer").eval()
    features, blank = adapter.encode_text(encoders, ["a red box", ""])
    shape = (4, 8, 8)
    noise = [SampleNoise(7, "0/a", member) for member in range(2)]
    batch = adapter.pad_text([features] * 2) | {"latents": torch.zeros(2, *shape)}
    batch |= blank_text(adapter.pad_text([blank] * 2))
    steps = SdeSteps("flow", 0.0, noise_grid(adapter, shape, 5, shift))
    plain, guided = Denoiser(adapter, torch.float32, 3.5), GuidedDenoiser(adapter, torch.float32, 3.5, guidance)
    found = roll_out(guided if guidance > 1 else plain, model, batch, steps, noise).latents
    pipeline = load_pipeline(adapter, model, encoders)
    start = torch.stack([each.start(shape) for each in noise])
    made = pipeline(
        prompt=["a red box"] * 2, height=16, width=16, num_inference_steps=5, latents=pack(start), output_type="latent",
        max_sequence_length=adapter.text_tokens, return_dict=False, negative_prompt=[""] * 2, true_cfg_scale=guidance,
    )[0]  # fmt: skip
    gap = float((found - unpack(made, (2, *shape))).abs().max())
    assert gap < 1e-5 if shift is None else gap > 1e-3
    if guidance > 1:
        assert float((found - roll_out(plain, model, batch, steps, noise).latents).abs().max()) > 1e-3


def test_noise_is_of_the_sample_alone() -> None:
    shape = (2, 3)
    one, other = SampleNoise(7, "0/a", 0), SampleNoise(7, "0/a", 1)
    assert not torch.equal(one.start(shape), other.start(shape))
    shared = [SampleNoise(7, "0/a", member, shares_start=True) for member in range(2)]
    assert torch.equal(shared[0].start(shape), shared[1].start(shape))
    assert not torch.equal(shared[0].of_step(0, shape), shared[1].of_step(0, shape))
    assert not torch.equal(one.of_step(0, shape), one.of_step(1, shape))
    assert not torch.equal(SampleNoise(7, "1/a", 0).start(shape), one.start(shape))


def trained(yaml: Path, save: Path, *words: str) -> list[dict[str, Any]]:
    train(yaml, save, *words)
    return [line for line in lines(save / "metrics.jsonl") if "loss" in line]


@pytest.mark.parametrize(("method", "guidance"), [("grpo", 2.5), ("nft", 1)])
def test_what_is_trained_is_what_was_drawn(method: str, guidance: float, folder: Path, tmp_path: Path) -> None:
    """To the bit: the log of the ratio, or the distance from the old policy, is 0 where a rollout serves one step."""
    words = (f"posttrain.method={method}", f"posttrain.flow.guidance_scale={guidance}", "training.train_iters=2")
    for line in trained(folder / "run.yaml", tmp_path / "run", *words):
        assert line["ratio_gap" if method == "grpo" else "old_gap"] == 0
        assert line["grad_norm"] > 0
        assert line["diversity"] > 0
        assert line["reward"] < 0
    shown = rollouts.run(tmp_path / "run").lines()
    assert len(shown) == 10 and shown[0] in PROMPTS  # two prompts, each with four samples
    reward, advantage, name = shown[1].split(maxsplit=2)
    assert float(reward) < 0 < float(advantage) and name.startswith("1/")


@pytest.mark.slow
def test_mm_check_finds_a_run_again(folder: Path, tmp_path: Path) -> None:
    save = f"training.save={tmp_path / 'run'}"
    assert mm("train", folder / "run.yaml", save, "training.train_iters=1").code == 0
    said = mm("check", folder / "run.yaml", save)
    assert said.code == 0, said.out


def test_mm_check_passes_what_trains_and_refuses_too_few_prompts(folder: Path) -> None:
    """Four prompts are two steps of four samples each; eight samples of a step are no rows."""
    said = mm("check", folder / "run.yaml")
    assert said.code == 0, said.out
    few = "posttrain.grpo.steps_per_generation=3"
    for verb in ("check", "train"):
        said = mm(verb, folder / "run.yaml", few)
        assert said.code == 4 and "the prompts of 3 steps" in said.out + said.err


@pytest.mark.slow
def test_states_in_bf16_are_found(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: states rounded to bf16 change ratios by far more than they are clipped at."""
    real = FlowRollouts.draw

    def rounded(*args: Any) -> Any:
        samples = real(*args)
        for sample in samples:
            assert isinstance(sample.path, Trajectories)
            sample.path.states = {index: each.bfloat16().float() for index, each in sample.path.states.items()}
        return samples

    monkeypatch.setattr(FlowRollouts, "draw", rounded)
    (line,) = trained(folder / "run.yaml", tmp_path / "run", "training.train_iters=1")
    assert line["ratio_gap"] > 1e-4


@pytest.mark.parametrize(
    "uses",
    [
        "posttrain.grpo.steps_per_generation=2",
        pytest.param("posttrain.grpo.num_iterations=2", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_stops_within_a_rollout_goes_on(uses: str, folder: Path, tmp_path: Path) -> None:
    yaml, words = folder / "run.yaml", (uses, "training.train_iters=2", "training.save_interval=1")
    train(yaml, tmp_path / "whole", *words)
    assert mm("train", yaml, f"training.save={tmp_path / 'parts'}", *words, "--steps", 1).code == 0
    train(yaml, tmp_path / "parts", *words)
    assert not differing(tensors(tmp_path / "whole"), tensors(tmp_path / "parts"))
    gaps = [line["ratio_gap"] for line in lines(tmp_path / "whole" / "metrics.jsonl") if "ratio_gap" in line]
    assert gaps[0] == 0 < gaps[1]  # the second step of a rollout is off the old policy


def test_an_older_policy_draws_the_samples(folder: Path, tmp_path: Path) -> None:
    """It is the trained one at first, and follows it slowly: with old_decay 0.5 it is half as far behind as with none
    of the trained one taken over, and its later rollout is another one."""
    words = ("posttrain.method=nft", "training.train_iters=2")
    half, slow = (
        trained(folder / "run.yaml", tmp_path / str(decay), *words, f"posttrain.nft.old_decay={decay}")
        for decay in (0.5, 0.999999)
    )
    assert half[0]["loss"] == slow[0]["loss"] and half[0]["old_gap"] == 0
    assert half[1]["old_gap"] == pytest.approx(slow[1]["old_gap"] / 2, rel=0.1)
    assert half[1]["loss"] != slow[1]["loss"]


@pytest.mark.slow
def test_a_run_that_stops_keeps_its_older_policy(folder: Path, tmp_path: Path) -> None:
    words = ("posttrain.method=nft", "posttrain.nft.old_decay=0.5", "posttrain.grpo.steps_per_generation=2",
             "training.train_iters=6", "training.save_interval=3")  # fmt: skip
    train(folder / "run.yaml", tmp_path / "whole", *words)
    assert mm("train", folder / "run.yaml", f"training.save={tmp_path / 'parts'}", *words, "--steps", 3).code == 0
    train(folder / "run.yaml", tmp_path / "parts", *words)
    assert not differing(tensors(tmp_path / "whole"), tensors(tmp_path / "parts"))
    assert mm("export", tmp_path / "whole", tmp_path / "exported").code == 0  # the policy, not the older one


@pytest.mark.slow
def test_the_divergence_of_steps_is_taken_from_either_reference(folder: Path, tmp_path: Path) -> None:
    """grpo.beta: 0 in the first step, of either kind the same later."""
    words = ("posttrain.grpo.beta=0.5", "training.lora.enable=true", "training.lr=0.01")
    found = [
        trained(folder / "run.yaml", tmp_path / kind, *words, f"posttrain.reference.kind={kind}")
        for kind in ("adapters_off", "frozen")
    ]
    distances = [[line["kl"] for line in each] for each in found]
    assert distances[0][0] == distances[1][0] == 0 < distances[0][1]
    assert distances[0] == pytest.approx(distances[1], rel=1e-4)
    assert [line["loss/kl"] for line in found[0]] == pytest.approx([0.5 * each for each in distances[0]], rel=1e-3)


@pytest.mark.slow
def test_adapters_switched_off_are_the_frozen_model(folder: Path, tmp_path: Path) -> None:
    """The reference of NFT's distance: it is 0 in the first step, and the same of either kind."""
    words = ("posttrain.method=nft", "posttrain.nft.kl=0.5", "training.lora.enable=true", "training.lr=0.01")
    found = [
        trained(folder / "run.yaml", tmp_path / kind, *words, f"posttrain.reference.kind={kind}")
        for kind in ("adapters_off", "frozen")
    ]
    distances = [[line["kl"] for line in each] for each in found]
    assert distances[0][0] == distances[1][0] == 0 < distances[0][1]
    assert distances[0] == pytest.approx(distances[1], rel=1e-4)
    assert [line["loss/kl"] for line in found[0]] == pytest.approx([0.5 * each for each in distances[0]], rel=1e-3)


def metrics_of_ranks(yaml: str, save: str, *words: str) -> list[tuple[float, float]]:
    """(loss, norm of gradients) of each step."""
    train(yaml, save, *words)
    found = [line for line in lines(Path(save) / "metrics.jsonl") if "loss" in line]
    return [(line["loss"], line["grad_norm"]) for line in found]


@pytest.fixture(scope="module")
def in_fp64(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("fp64")
    kept = {"posttrain": {"grpo": {"num_generations": 4, "beta": 0.0, "clip_range": 0.1, "num_iterations": 2}}}
    yield {family: make_tiny_rollout_run(folder / family, family, parallel=FP64, **kept) for family in ("flux", "t2v")}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "nft"])
@pytest.mark.parametrize(("ranks", "words"), [(2, ()), (4, ("parallel.fully_shard_parallel_size=2",))])
def test_ranks_equal_one_process(
    ranks: int, words: tuple[str, ...], method: str, in_fp64: dict[str, Path], tmp_path: Path
) -> None:
    """Wan under FSDP, and under FSDP 2 × 2 copies: the same samples, rewards, losses and gradients."""
    yaml, common = str(in_fp64["t2v"]), ("training.train_iters=3", f"posttrain.method={method}")
    alone = metrics_of_ranks(yaml, str(tmp_path / "one"), *common, "training.gradient_accumulation_steps=4")
    shares = f"training.gradient_accumulation_steps={4 // ranks}"
    found = run_ranks(ranks, metrics_of_ranks, yaml, str(tmp_path / "many"), *common, shares, *words)[0]
    for one, other in zip(alone, found, strict=True):
        assert other == pytest.approx(one, rel=1e-9, abs=1e-12)
