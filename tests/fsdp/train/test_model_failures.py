"""A step that fails inside the library of the model's class is told as that: what, where, on which samples."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from mindspeed_mm.fsdp.models.deepseek_vl2 import modeling_deepseek_vl2
from mindspeed_mm.fsdp.train.run.failures import ModelCodeError, explained_model
from tests.helpers.runs import mm
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_run import make_rows, make_tiny_run

from transformers.models.qwen3 import modeling_qwen3  # isort: skip  (after tests.helpers, which guards torchvision)

BATCH = {"sample_ids": ["a"], "input_ids": torch.ones(1, 4, dtype=torch.long)}


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    make_tiny_qwen3(tmp_path / "model")
    make_rows(tmp_path, images=(0,))
    return make_tiny_run(tmp_path, training={"save": str(tmp_path / "run")})


def break_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers' own line then adds up is of two lengths."""
    monkeypatch.setattr(modeling_qwen3, "rotate_half", lambda x: x[..., :3])


def test_a_forward_that_fails_in_transformers_names_its_place(
    yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_rotation(monkeypatch)
    said = mm("train", yaml)
    assert said.code == 1
    told = "the model's own code, in transformers, failed on rank 0 in step 1: RuntimeError: The size of tensor"
    assert told in said.err, said.err
    assert re.search(r"\(\S*modeling_qwen3\.py:\d+\)", said.err)
    assert re.search(r"rows\.jsonl:\d+, rows\.jsonl:\d+: \{.*'input_ids': \(2, \d+\)", said.err)
    assert "this is a bug" not in said.err and "Traceback" not in said.err and "mm check" in said.err
    log = (tmp_path / "run" / "log" / "train.log").read_text()
    assert "Traceback" in log and "in apply_rotary_pos_emb" in log


def test_the_traceback_is_shown_where_it_is_asked_for(yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MM_TRACEBACK", "1")
    break_rotation(monkeypatch)
    said = mm("train", yaml, "training.save=null")
    assert "Traceback" in said.err and "in apply_rotary_pos_emb" in said.err


def test_what_other_code_raises_is_not_laid_on_the_library() -> None:
    q = torch.ones(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match="size of tensor"), explained_model([BATCH], "step 3", 1):
        q + torch.ones(3)
    told = r"on rank 1 in step 3: RuntimeError.*modeling_qwen3\.py:\d+"
    with pytest.raises(ModelCodeError, match=told), explained_model([BATCH], "step 3", 1):
        modeling_qwen3.apply_rotary_pos_emb(q, q, q[0], torch.ones(1, 4, 3))


def test_our_own_model_that_cannot_take_a_batch_is_told_as_a_librarys_is() -> None:
    """One grid of tiles for two pictures: what another model's processor may make."""
    tiles, crop = torch.zeros(1, 3, 20, 20), torch.tensor([[1, 1], [1, 1]])
    model = mock.Mock(projector=torch.nn.Identity(), vision=torch.nn.Identity())
    told = r"own code, in mindspeed_mm, failed on rank 0 in step 1: \w+: .*modeling_deepseek_vl2\.py:\d+"
    with pytest.raises(ModelCodeError, match=told) as failed, explained_model([BATCH], "step 1", 0):
        modeling_deepseek_vl2.DeepseekVLV2ForCausalLM.get_image_features(model, tiles, crop)
    assert "another release" not in str(failed.value) and "report it" in str(failed.value)
