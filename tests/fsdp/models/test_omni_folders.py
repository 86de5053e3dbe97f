"""Omni folders as they are released hold several models: the thinker is trained, the others are kept, never loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoProcessor,
    Qwen2_5OmniConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
)

from mindspeed_mm.checkpoint.lazy_tensor import Stored
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.data.data_utils.positions import RopeIndexPositions, build_positions
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.tasks.answer.generation import load_model
from mindspeed_mm.tasks.check import check
from tests.helpers.runs import mm, train
from tests.helpers.tiny_omni import make_tiny_omni_run

pytestmark = pytest.mark.edge("R14")
BESIDE = {"talker.model.norm.weight": 3, "token2wav.code2wav_dit_model.proj.bias": 5}


def as_released(thinker: Path, folder: Path, without: str = "", **config: object) -> Path:
    """A thinker's folder in the layout of a release: all configurations in one, names behind `thinker.`."""
    AutoProcessor.from_pretrained(thinker).save_pretrained(folder)
    whole = Qwen2_5OmniConfig(thinker_config=json.loads((thinker / "config.json").read_text()), **config)
    whole.architectures = ["Qwen2_5OmniModel"]
    whole.save_pretrained(folder)
    weights = {f"thinker.{name}": value for name, value in load_file(thinker / "model.safetensors").items()}
    weights |= {name: torch.rand(size) for name, size in BESIDE.items()}
    kept = {name: value for name, value in weights.items() if not without or not name.startswith(without)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "spk_dict.pt").write_bytes(b"voices")
    return folder


def build(folder: Path) -> torch.nn.Module:
    return ModelHub.build(ModelArguments(model_name_or_path=str(folder)))


@pytest.fixture
def released(tmp_path: Path) -> Path:
    make_tiny_omni_run(tmp_path, {})
    return as_released(tmp_path / "model", tmp_path / "released")


def test_the_thinker_has_the_folders_weights(released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = Stored._copy_to
    monkeypatch.setattr(Stored, "_copy_to", lambda self, *args: (read.append(self.key), real(self, *args))[1])
    model = build(released)
    ModelHub.load_weights(model, ModelArguments(model_name_or_path=str(released)), seed=0, device=torch.device("cpu"))
    expected = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(released.parent / "model").state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert read and not BESIDE.keys() & set(read)


def test_a_released_folder_is_trained_and_exported_whole(released: Path, tmp_path: Path) -> None:
    yaml = tmp_path / "run.yaml"
    words = [f"model.model_name_or_path={released}", "training.train_iters=1"]
    assert not check.run(yaml, words).findings
    train(yaml, tmp_path / "run", *words)
    said = mm("export", tmp_path / "run", tmp_path / "exported")
    assert said.code == 0, said.err

    before, after = (load_file(folder / "model.safetensors") for folder in (released, tmp_path / "exported"))
    assert {key: value.shape for key, value in before.items()} == {key: value.shape for key, value in after.items()}
    same = {key for key, value in before.items() if torch.equal(value, after[key])}
    assert BESIDE.keys() <= same < before.keys()
    assert (tmp_path / "exported" / "spk_dict.pt").read_bytes() == b"voices"
    assert load_model(tmp_path / "exported").state_dict().keys() == build(released).state_dict().keys()


@pytest.mark.parametrize("part", ["thinker", "talker", "token2wav"])
def test_a_part_that_is_missing_is_named(released: Path, tmp_path: Path, part: str) -> None:
    folder = as_released(tmp_path / "model", tmp_path / "cut", without=f"{part}.")
    result = check.run(tmp_path / "run.yaml", [f"model.model_name_or_path={folder}"])
    (finding,) = [each for each in result.findings if each.stage == "module patterns"]
    assert "enable_audio_output: false" in finding.headline
    assert (finding.exit_code, finding.problem.key) == (4, f"{part}.")
    with pytest.raises(ModelFolderError, match=r"whose weights are not stored.*enable_audio_output: false"):
        build(folder)


def test_one_that_does_not_speak_holds_the_thinker_alone(released: Path, tmp_path: Path) -> None:
    folder = as_released(tmp_path / "model", tmp_path / "silent", without="talker.", enable_audio_output=False)
    assert type(build(folder)) is Qwen2_5OmniThinkerForConditionalGeneration


def test_positions_are_counted_by_the_thinker(released: Path) -> None:
    assert isinstance(build_positions(released, AutoProcessor.from_pretrained(released)), RopeIndexPositions)
