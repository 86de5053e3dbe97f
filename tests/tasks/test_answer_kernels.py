"""The attention kernel that answers are computed by is the one that is chosen for all other calls, and it is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.tasks.answer.generation import load_generator, load_model
from tests.helpers.fake_kernels import fresh_process, pretend_device, pretend_installed, registered, wrong_numbers
from tests.helpers.tiny_models import make_tiny_qwen3


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with fresh_process():
        yield


def scores(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(20, 29)[None]).logits


def test_an_installed_kernel_computes_the_answers_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_qwen3(tmp_path / "model", dtype=torch.bfloat16)
    plain = scores(load_model(folder))
    generator = load_generator(folder)
    assert "attention" not in capsys.readouterr().err, "a CPU has nothing to choose from"
    pretend_device(monkeypatch, "cuda", (9, 0))
    pretend_installed(monkeypatch, tmp_path, "flash-attn-3", "3.0.0")
    with registered("FA3", wrong_numbers):
        generator = load_generator(folder)
        assert generator.model.config._attn_implementation == "sdpa"
        assert not torch.allclose(scores(generator.model), plain), "the kernel that was chosen is not the one that ran"
    assert "attention: sdpa by flash_attention_3 (flash-attn-3 3.0.0 is installed)" in capsys.readouterr().err


def test_what_would_be_faster_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_qwen3(tmp_path / "model", dtype=torch.bfloat16)
    pretend_device(monkeypatch, "cuda", (9, 0))
    load_generator(folder)
    said = capsys.readouterr().err
    assert "attention: sdpa by torch_flash" in said and "faster: build flash-attn-3" in said
