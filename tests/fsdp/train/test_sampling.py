"""Samples while training: they show the model as it is, with its average when there is one, on any number of ranks, and
leave no trace in what is trained."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.core.errors import ConfigError, DataError, MMError, ModelFolderError
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.sampling.finite import NotFiniteError
from mindspeed_mm.fsdp.sampling.sampler import DiffusionSampler, plan_batches
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.generator_family import GeneratorFamily
from mindspeed_mm.fsdp.train.hooks import sampling as sampling_module
from mindspeed_mm.fsdp.train.hooks.sampling import SampleHook, build_sample_hook, check_sampling
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.run.random_state import capture_rng
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from mindspeed_mm.fsdp.train.trainer import Trainer
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import differing, kinds, lines, losses, tensors
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_generators import make_tiny_wan

PROMPTS = ("a red box", "two blue lines", "")
ASKED = [
    f"training.sampling.prompts={list(PROMPTS)!r}",
    "training.sampling.interval=2",
    "training.sampling.num_inference_steps=2",
    "training.sampling.height=16",
    "training.sampling.width=16",
    "training.sampling.num_samples=2",
    "training.train_iters=4",
]


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_generator_run(tmp_path_factory.mktemp("run"))


class Sampled(Trainer):
    """Keeps its engine, and the sampler that the run would use."""

    engine: TrainEngine
    family: GeneratorFamily

    def _build(self, *args: Any, **kwargs: Any) -> tuple[TrainEngine, RunParts]:
        self.engine, parts = super()._build(*args, **kwargs)
        self.family = parts.family
        return self.engine, parts

    def sampler(self) -> DiffusionSampler:
        family = self.family
        return DiffusionSampler(family.adapter, self.engine.model, family.encoders, family.compute_dtype)


def train(yaml: Path | str, save: Path | str | None, *overrides: str) -> Sampled:
    words = [*ASKED, *([f"training.save={save}"] if save else []), *overrides]
    trainer = Sampled(load_with_plugins(Path(yaml), words))
    trainer.train()
    return trainer


def pictures(save: Path, step: int) -> dict[str, np.ndarray]:
    folder = save / "samples" / f"iter_{step:07}"
    return {path.name: np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))}


def made_now(trainer: Sampled) -> list[np.ndarray]:
    """What the trained weights give, asked for directly."""
    sampler, sampling = trainer.sampler(), trainer.arguments.training.sampling
    prompts = sampling_module.prompts_of(sampling)
    return [
        sample.frames[0]
        for batch in plan_batches(prompts, sampling)
        for sample in sampler.make(batch, sampler.prepared(prompts, sampling))
    ]


def test_rounds_are_written_and_change_nothing(yaml: Path, tmp_path: Path) -> None:
    trainer = train(yaml, tmp_path / "with")
    train(yaml, tmp_path / "without", "training.sampling.interval=0")
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert differing(tensors(tmp_path / "with"), tensors(tmp_path / "without")) == []
    assert not (tmp_path / "without" / "samples").exists()
    assert all(module.training for module in trainer.engine.model.modules())

    names = ["000_00_a-red-box", "000_01_a-red-box", "001_00_two-blue-lines", "001_01_two-blue-lines", "002_00_empty"]
    for step in (2, 4):
        found = pictures(tmp_path / "with", step)
        assert list(found) == [f"{name}.png" for name in (*names, "002_01_empty")]
        manifest = lines(tmp_path / "with" / "samples" / f"iter_{step:07}" / "samples.jsonl")
        assert [entry["file"] for entry in manifest] == list(found)
        assert {entry["step"] for entry in manifest} == {step}
        assert [entry["prompt"] for entry in manifest[::2]] == list(PROMPTS)
        assert len({entry["noise_seed"] for entry in manifest}) == 6
    assert not np.array_equal(*(pictures(tmp_path / "with", step)["000_00_a-red-box.png"] for step in (2, 4)))
    for found, expected in zip(pictures(tmp_path / "with", 4).values(), made_now(trainer), strict=True):
        assert np.array_equal(found, expected)
    (event, _) = (event for event in lines(tmp_path / "with" / "events.jsonl") if event["kind"] == "samples")
    assert (event["step"], event["count"]) == (2, 6)


def test_random_states_are_put_back(yaml: Path, tmp_path: Path) -> None:
    real = DiffusionSampler.make

    def wasteful(self: DiffusionSampler, *args: Any) -> Any:
        torch.rand(3), np.random.rand(3)
        return real(self, *args)

    def state(name: str) -> torch.Tensor:
        train(yaml, tmp_path / name)
        return torch.cat([part.flatten().double() for part in capture_rng().values()])

    expected = state("plain")
    with mock.patch.object(DiffusionSampler, "make", wasteful):
        assert torch.equal(state("put back"), expected)
        with mock.patch.object(sampling_module, "restore_rng", lambda state: None):  # the planted fault
            assert not torch.equal(state("not put back"), expected)


def test_the_average_is_sampled_when_there_is_one(yaml: Path, tmp_path: Path) -> None:
    average = ("training.ema.enable=true", "training.ema.decay=0.9", "training.lr=0.01")
    trainer = train(yaml, tmp_path / "run", *average)
    found = list(pictures(tmp_path / "run", 4).values())
    trained = made_now(trainer)
    assert trainer.engine.ema is not None
    with trainer.engine.ema.applied():
        averaged = made_now(trainer)
    assert all(map(np.array_equal, found, averaged))
    assert not any(map(np.array_equal, found, trained))
    train(yaml, tmp_path / "raw", *average, "training.ema.use_for_evaluation=false")
    assert all(map(np.array_equal, pictures(tmp_path / "raw", 4).values(), trained))


def train_on_this_rank(yaml: str, save: str, *overrides: str) -> None:
    train(yaml, save, *overrides)


def test_two_ranks_share_the_work(yaml: Path, tmp_path: Path) -> None:
    run_ranks(2, train_on_this_rank, str(yaml), str(tmp_path / "two"), "training.micro_batch_size=1")
    train(yaml, tmp_path / "one")
    assert [event for event in kinds(tmp_path / "two") if event == "samples"] == ["samples"] * 2
    for step in (2, 4):
        alone, together = pictures(tmp_path / "one", step), pictures(tmp_path / "two", step)
        assert list(alone) == list(together)
        assert np.mean([np.abs(alone[name].astype(int) - together[name]) for name in alone]) < 0.01
        files = [entry["file"] for entry in lines(tmp_path / "two" / "samples" / f"iter_{step:07}" / "samples.jsonl")]
        assert files == list(alone)


def test_a_model_that_computes_in_bf16_is_sampled_alike_in_any_order(yaml: Path, tmp_path: Path) -> None:
    trainer = train(yaml, tmp_path / "run", "parallel.fsdp_plan.param_dtype=bf16")
    found = list(pictures(tmp_path / "run", 4).values())
    for _ in range(2):  # the first time its weights are sharded fp32, later they are gathered bf16
        assert all(map(np.array_equal, made_now(trainer), found))


def test_what_cannot_be_shown_does_not_end_the_training(
    yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = iter([NotFiniteError("the sample is not made of finite numbers"), OSError(28, "No space left on device")])

    def fail(*_: Any) -> Any:
        raise next(faults, OSError(28, "No space left on device"))

    with mock.patch.object(DiffusionSampler, "make", fail):
        train(yaml, tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 4
    said = capsys.readouterr().out
    assert said.count("warning: sampling: the sample is not made of finite numbers") == 1
    assert said.count("No space left on device") == 2  # once a round
    assert "1 prompt is empty (training.sampling.prompts[2])" in said
    told = [event for event in lines(tmp_path / "run" / "events.jsonl") if event["kind"] == "warning"]
    assert sum(event["message"].startswith("sampling: ") for event in told) == 3


@pytest.mark.parametrize(
    ("save", "overrides", "error", "message"),
    [
        (False, [], ConfigError, r"training.save.*no run folder"),
        (True, ["training.sampling.prompts=[]"], ConfigError, r"training.sampling.prompts.*no prompts"),
        (True, ["training.sampling.height=15"], ConfigError, r"training.sampling.*15×16.*Use 16×16"),
        (True, ["training.sampling.prompts_file=gone.txt"], DataError, r"gone.txt.*no such file"),
    ],
)  # fmt: skip
def test_what_is_off_is_said_before_the_first_step(
    yaml: Path, tmp_path: Path, save: bool, overrides: list[str], error: type[MMError], message: str
) -> None:
    with pytest.raises(error, match=message):
        train(yaml, tmp_path / "run" if save else None, *overrides)


def test_a_picture_that_is_broken_is_said_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a cat", "image": "a.png"}\n')
    sampling = SamplingArguments(prompts_file=str(tmp_path / "p.jsonl"), interval=1, height=16, width=16, num_frames=5)
    with pytest.raises(DataError, match=r"p\.jsonl:1.*'a\.png' is (broken|not an image)"):
        check_sampling(find_adapter(make_tiny_wan(tmp_path / "wan", task="i2v")), sampling, "run")


def test_an_encoder_that_is_missing_is_said_before_the_first_step(yaml: Path, tmp_path: Path) -> None:
    shutil.copytree(yaml.parent / "model", tmp_path / "model")
    (tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    config = load_with_plugins(yaml, ASKED).arguments.training.sampling
    build: Callable[..., SampleHook | None] = build_sample_hook
    with pytest.raises(ModelFolderError, match="vae"):
        build(find_adapter(tmp_path / "model"), mock.Mock(), config, "run", mock.Mock())
    assert build(mock.Mock(), mock.Mock(), config.model_copy(update={"interval": 0}), None, None) is None
