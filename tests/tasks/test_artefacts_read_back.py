"""What generators' runs write, read back by each command and library that should read it: one cell a test."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mindspeed_mm.core.model_kinds import EXPERT_PARTS
from mindspeed_mm.fsdp.models.diffusion.components import diffusers_class
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.sampling.sampler import MadeSample
from mindspeed_mm.tasks.draw.sample_folder import SampleFolder
from tests.families.test_generators import make_run
from tests.helpers.runs import mm, train
from tests.helpers.tiny_generator_families import FAMILIES, smaller_pictures

BY_DEFAULT = ("wan2_2",)
LORA = ("training.lora.enable=true", "training.lora.rank=2", "training.lr=0.05", "training.ema.enable=false")
CASES = [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in FAMILIES]


class Written:
    """A run that trained adapters, and what was written of it, made when first asked for."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.family, self.folder = name, FAMILIES[name], folder
        with smaller_pictures():
            self.yaml = make_run(name, folder)
            train(self.yaml, folder / "run", *LORA)
        self.model, self.run = folder / "model", folder / "run"
        self.parts = EXPERT_PARTS if (self.model / "transformer_2").is_dir() else EXPERT_PARTS[:1]

    def export(self, name: str, *options: object) -> Path:
        out = self.folder / name
        if not out.exists():
            said = mm("export", self.run, out, *options)
            assert said.code == 0, said.err
        return out

    @property
    def lora(self) -> Path:
        return self.export("lora")

    @property
    def merged(self) -> dict[str, torch.Tensor]:
        """Weights of all transformers with the adapters merged."""
        return self.weights(self.export("merged", "--merge"))

    def weights(self, model: Path) -> dict[str, torch.Tensor]:
        found = {}
        for part in self.parts:
            for file in sorted((model / part).glob("*.safetensors")):
                found |= {f"{part}.{key}": tensor.float() for key, tensor in load_file(file).items()}
        return found

    def check_merged(self, weights: dict[str, torch.Tensor]) -> None:
        """These are the merged ones, and not those of the base."""
        expected, base = self.merged, self.weights(self.model)
        assert weights.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-5, atol=1e-6)
        assert any((expected[key] - base[key]).abs().max() > 1e-3 for key in expected)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    made: dict[str, Written] = {}

    def of(name: str) -> Written:
        if name not in made:
            made[name] = Written(name, tmp_path_factory.mktemp(name))
        return made[name]

    return of


def merged_of_run(run: Path, out: Path, written: Written) -> dict[str, torch.Tensor]:
    said = mm("export", run, out, "--merge")
    assert said.code == 0, said.err
    return written.weights(out)


Reader = Callable[[Written, Path], dict[str, torch.Tensor]]
"""Reads the adapters, and returns the weights with them merged."""


def by_merging(written: Written, tmp: Path) -> dict[str, torch.Tensor]:
    said = mm("merge", written.model, written.lora, "--out", tmp / "merged")
    assert said.code == 0, said.err
    return written.weights(tmp / "merged")


def by_going_on(written: Written, tmp: Path) -> dict[str, torch.Tensor]:
    start = f"training.lora.pretrained_lora_path={written.lora}"
    train(written.yaml, tmp / "run", *LORA, start, "training.lr=0", "training.train_iters=1")
    return merged_of_run(tmp / "run", tmp / "merged", written)


def by_lying_under_others(written: Written, tmp: Path) -> dict[str, torch.Tensor]:
    under = f"training.lora.frozen_adapters=[{written.lora}]"
    train(written.yaml, tmp / "run", *LORA, under, "training.lr=0", "training.train_iters=1")
    return merged_of_run(tmp / "run", tmp / "merged", written)


def by_diffusers(written: Written, tmp: Path) -> dict[str, torch.Tensor]:
    """With the lines of the folder's own model card."""
    card = (written.lora / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    code = code.replace("path/to/this/folder", str(written.lora)).replace("path/to/model", str(written.model))
    named: dict[str, Any] = {}
    diffusers_class("DiffusionPipeline")
    exec(compile(code, "README.md", "exec"), named)
    found = {}
    for part in written.parts:
        transformer = getattr(named["pipeline"], part)
        transformer.fuse_lora()
        transformer.unload_lora()
        found |= {f"{part}.{key}": tensor.float() for key, tensor in transformer.state_dict().items()}
    return found


READERS: dict[str, Reader] = {
    "mm merge": by_merging,
    "pretrained_lora_path": by_going_on,
    "frozen_adapters": by_lying_under_others,
    "diffusers": by_diffusers,
}
OWN_PIPELINES = {"opensoraplan", "opensoraplan_i2v", "opensoraplan_1_5"}
"""Families that diffusers has no pipeline for; their folder's model card draws by `mindspeed_mm.infer`."""
CELLS = [
    pytest.param(name, reader, id=f"{name}-{reader}", marks=() if name in BY_DEFAULT else pytest.mark.slow)
    for name in FAMILIES
    for reader in READERS
    if reader != "diffusers" or name not in OWN_PIPELINES
]


@pytest.mark.edge("BN15")
@pytest.mark.parametrize(("name", "reader"), CELLS)
def test_adapters_are_read_back(name: str, reader: str, written: Callable[[str], Written], tmp_path: Path) -> None:
    case = written(name)
    with smaller_pictures():
        case.check_merged(READERS[reader](case, tmp_path))


def drawn(model: Path, written: Written, out: Path, *options: object) -> np.ndarray:
    family = written.family
    words = ["--size", f"{family.side}x{family.side}", "--steps", 2, "--out", out]
    words += ["--frames", family.frames] if family.frames > 1 else []
    adapter = find_adapter(written.model, task=family.task)
    for role in adapter.roles.get(adapter.task, ()):
        if not role.is_optional:
            words += [f"--{role.prompt.replace('_', '-')}", written.folder / "media" / media_of(role.name, written)]
    words += ["--task", family.task] if family.task else []
    frames: list[np.ndarray] = []
    real = SampleFolder.write

    def spy(self: SampleFolder, order: Any, sample: MadeSample, rank: int) -> None:
        frames.append(sample.frames.astype(int))
        real(self, order, sample, rank)

    with smaller_pictures(), mock.patch.object(SampleFolder, "write", spy):
        said = mm("infer", model, "--prompt", "a red box", *words, *options)
    assert said.code == 0, said.err
    (found,) = frames
    return found


def media_of(role: str, written: Written) -> str:
    names = sorted(path.name for path in (written.folder / "media").iterdir())
    return next((name for name in names if role in name), names[0])


MODELS: dict[str, Callable[[Written, Path], tuple[Path, list[object]]]] = {
    "adapters beside the base": lambda written, _: (written.model, ["--lora", written.lora]),
    "the run": lambda written, _: (written.run, []),
    "a checkpoint of the run": lambda written, _: (written.run / "iter_0000002", []),
    "the merged folder": lambda written, _: (written.export("merged", "--merge"), []),
}


@pytest.mark.edge("BN15")
@pytest.mark.parametrize("name", CASES)
def test_mm_infer_draws_alike_whatever_was_written(
    name: str, written: Callable[[str], Written], tmp_path: Path
) -> None:
    case = written(name)
    shown = []
    for number, make in enumerate(MODELS.values()):
        model, options = make(case, tmp_path)
        shown.append(drawn(model, case, tmp_path / str(number), *options))
    base = drawn(case.model, case, tmp_path / "base")
    assert all(np.abs(each - shown[0]).max() <= 1 for each in shown[1:])
    assert np.abs(base - shown[0]).max() > 1


@pytest.mark.edge("BN15")
def test_adapters_of_one_expert_alone_are_read(written: Callable[[str], Written], tmp_path: Path) -> None:
    case, one = written("wan2_2"), tmp_path / "one"
    shutil.copytree(case.lora / "transformer_2", one / "transformer_2")
    said = mm("merge", case.model, one, "--out", tmp_path / "merged")
    assert said.code == 0, said.err
    found, base, both = case.weights(tmp_path / "merged"), case.weights(case.model), case.merged
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, (both if key.startswith("transformer_2.") else base)[key])
    drawn(case.model, case, tmp_path / "clips", "--lora", one)


@pytest.mark.edge("BN15")
def test_a_folder_of_two_for_a_model_with_one_is_refused(written: Callable[[str], Written], tmp_path: Path) -> None:
    case = written("wan2_2")
    one = tmp_path / "model"
    FAMILIES["wan"].make(one)
    said = mm("merge", one, case.lora, "--out", tmp_path / "merged")
    assert said.code != 0 and "do not belong to this model" in said.err


FOREIGN = [(name, names) for name in ("wan2_2", "flux", "wan") for names in ("comfyui", "kohya")]


@pytest.mark.edge("BN12", "BN15")
@pytest.mark.parametrize(
    ("name", "lora_format"),
    [pytest.param(*each, marks=() if each[0] in BY_DEFAULT else pytest.mark.slow) for each in FOREIGN],
)
def test_adapters_by_other_tools_names_draw_as_by_diffusers(
    name: str, lora_format: str, written: Callable[[str], Written], tmp_path: Path
) -> None:
    case = written(name)
    renamed = case.export(f"lora_{lora_format}", "--lora-format", lora_format)
    own = drawn(case.model, case, tmp_path / "own", "--lora", case.lora)
    theirs = drawn(case.model, case, tmp_path / "theirs", "--lora", renamed)
    assert np.abs(own - theirs).max() <= 1
    assert np.abs(own - drawn(case.model, case, tmp_path / "base")).max() > 1
