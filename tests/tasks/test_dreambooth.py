"""`train_dreambooth_flux.py`: diffusers' flags, pictures of the class, the term that preserves the prior."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from mindspeed_mm.core.errors import MMError, UsageError
from mindspeed_mm.fsdp.loss.denoising import DenoisingObjective
from mindspeed_mm.fsdp.models.lora.files import DIFFUSERS_WEIGHTS
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.tasks.dreambooth import run as dreambooth
from mindspeed_mm.tasks.dreambooth.run import configuration, read_flags
from tests.helpers.runs import mm
from tests.helpers.tiny_generators import make_tiny_flux


def pictures(folder: Path, count: int) -> Path:
    folder.mkdir()
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def words(folder: Path, *more: str) -> list[str]:
    made = {
        "pretrained_model_name_or_path": folder / "model",
        "instance_data_dir": folder / "dog",
        "instance_prompt": "a photo of sks dog",
        "output_dir": folder / "out",
    }
    return [*(f"--{name}={value}" for name, value in made.items()), *more]


PRIOR = ["--with_prior_preservation", "--class_prompt=a photo of a dog", "--prior_loss_weight=0.5"]


def test_a_run_with_class_pictures(tmp_path: Path) -> None:
    make_tiny_flux(tmp_path / "model")
    pictures(tmp_path / "dog", 2)
    prior = [*PRIOR, f"--class_data_dir={tmp_path / 'class'}", "--num_class_images=4", "--num_inference_steps=1"]
    small = ["--resolution=16", "--max_train_steps=2", "--train_batch_size=2", "--rank=4", "--report_to=tensorboard"]
    exported = dreambooth.run(words(tmp_path, *prior, *small))
    assert len(list((tmp_path / "class").glob("*.png"))) == 4
    assert any("lora_A" in key for key in load_file(exported / DIFFUSERS_WEIGHTS))
    lines = [json.loads(line) for line in (tmp_path / "out/run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line and "step" in line]
    assert len(steps) == 2 and all("prior" in json.dumps(line) for line in steps)
    config = load_config(tmp_path / "out/dreambooth.yaml").arguments
    instance, of_class = config.data.dataset_param.basic_parameters.dataset
    assert (instance.repeats, instance.prior, of_class.prior) == (1, False, True)
    assert config.training.micro_batch_size == 4


@pytest.mark.edge("BN3")
def test_each_step_takes_as_many_of_the_thing_as_of_its_class(tmp_path: Path) -> None:
    """The loss is that of diffusers' script: mean over the pictures of the thing + weight · mean over those of its
    class, of each of the steps of ⌈max(pictures of either) / batch⌉ an epoch."""
    make_tiny_flux(tmp_path / "model")
    pictures(tmp_path / "dog", 2), pictures(tmp_path / "class", 7)
    prior = [*PRIOR, f"--class_data_dir={tmp_path / 'class'}", "--num_class_images=5"]
    small = ["--resolution=16", "--num_train_epochs=2", "--train_batch_size=2", "--rank=4"]
    errors: list[tuple[list[float], list[bool]]] = []
    real = DenoisingObjective.errors

    def spy(self: DenoisingObjective, model: Any, batch: Any) -> Any:
        found = real(self, model, batch)
        errors.append((found.tolist(), batch["is_prior"].tolist()))
        return found

    with mock.patch.object(DenoisingObjective, "errors", spy):
        dreambooth.run(words(tmp_path, *prior, *small))
    lines = [json.loads(line) for line in (tmp_path / "out/run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line and "step" in line]
    assert len(steps) == len(errors) == 2 * 3
    for line, (of_each, is_prior) in zip(steps, errors, strict=True):
        assert is_prior == [False] * (len(is_prior) // 2) + [True] * (len(is_prior) // 2)
        of_thing, of_class = np.split(np.array(of_each), 2)
        assert line["loss"] == pytest.approx(of_thing.mean() + 0.5 * of_class.mean(), rel=1e-5)
    assert sum(len(of_each) for of_each, _ in errors) == 2 * 2 * 5


@pytest.mark.edge("BN14")
def test_alpha_is_that_of_diffusers_script(tmp_path: Path) -> None:
    """`--lora_alpha` of examples/dreambooth/train_dreambooth_lora_flux.py is 4, whatever the rank is."""
    pictures(tmp_path / "dog", 1)
    options = read_flags(words(tmp_path, "--rank=16"))
    options.max_train_steps = 1
    assert load_config(configuration(options, tmp_path)).arguments.training.lora.alpha == 4


@pytest.mark.slow
def test_features_keep_which_samples_are_of_the_class(tmp_path: Path) -> None:
    make_tiny_flux(tmp_path / "model")
    pictures(tmp_path / "dog", 2), pictures(tmp_path / "class", 2)
    options = read_flags(words(tmp_path, *PRIOR, f"--class_data_dir={tmp_path / 'class'}", "--resolution=16",
                               "--max_train_steps=2", "--train_batch_size=2"))  # fmt: skip
    yaml = dreambooth.write_run(options, tmp_path / "out")
    features = f"data.dataset_param.basic_parameters.features_dir={tmp_path / 'features'}"
    losses = []
    for more in ([], [features]):
        if more:
            assert mm("extract", yaml, *more).code == 0
        said = mm("train", yaml, *more, f"training.save={tmp_path / f'run{len(more)}'}")
        assert said.code == 0, said.err
        lines = (tmp_path / f"run{len(more)}/metrics.jsonl").read_text().splitlines()
        losses.append([{k: v for k, v in json.loads(line).items() if k.startswith("loss")} for line in lines])
    raw, extracted = losses  # captions of other rows share a batch of the text encoder: the last bits may differ
    assert [line.keys() for line in raw] == [line.keys() for line in extracted]
    for one, other in zip(raw, extracted, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert all(line["loss/prior"] > 0 for line in raw)


CASES: list[tuple[list[str], dict[str, Any]]] = [
    ([], {"timestep_density": "uniform", "shift": 1.0, "guidance": 3.5}),
    (["--weighting_scheme=logit_normal", "--logit_mean=0.5"], {"timestep_density": "logit_normal", "logit_mean": -0.5}),
    (["--weighting_scheme=cosmap", "--guidance_scale=1"], {"loss_weighting": "cosmap", "guidance": 1.0}),
    (PRIOR, {"prior_loss_weight": 0.5}),
]


@pytest.mark.parametrize(("more", "expected"), CASES, ids=["plain", "logit-normal", "cosmap", "prior"])
def test_flags_are_the_configuration(more: list[str], expected: dict[str, Any], tmp_path: Path) -> None:
    pictures(tmp_path / "dog", 1)
    options = read_flags(words(tmp_path, *more, f"--class_data_dir={tmp_path}"))
    config = load_config(configuration(options, tmp_path)).arguments
    diffusion = config.training.diffusion.model_dump()
    assert diffusion | expected == diffusion


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (["--train_text_encoder"], "--train_text_encoder"),
        (["--optimizer", "prodigy"], "--optimizer"),
        (["--instance_promt=a"], "--instance_promt"),
        (["--with_prior_preservation"], "--class_data_dir"),
        (["--rank=much"], ""),
    ],
)
def test_what_is_refused(more: list[str], key: str, tmp_path: Path) -> None:
    pictures(tmp_path / "dog", 1)
    with pytest.raises(UsageError) as caught:
        read_flags(words(tmp_path, *more))
    assert caught.value.problems[0].key == key


def test_class_pictures_without_a_weight_are_refused(tmp_path: Path) -> None:
    pictures(tmp_path / "dog", 1)
    options = read_flags(words(tmp_path, *PRIOR, f"--class_data_dir={tmp_path}"))
    content = configuration(options, tmp_path)
    del content["training"]["diffusion"]["prior_loss_weight"]
    with pytest.raises(MMError, match="preserve the prior"):
        load_config(content)
