"""`mm check` and the log of a run say which attention kernel was chosen, why, and what would be faster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_mm.cli.main import run
from tests.helpers.fake_kernels import fresh_process, pretend_device
from tests.helpers.tiny_run import make_tiny_run


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with fresh_process():
        yield


def test_the_choice_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_tiny_run(tmp_path, training={"save": str(tmp_path / "out"), "train_iters": 1})
    words = [str(config), "parallel.fsdp_plan.param_dtype=bf16"]
    assert run(["check", *words]) == 0
    on_a_cpu = capsys.readouterr().out
    assert "  note: attention on this machine: mm_varlen\n" in on_a_cpu
    assert "faster" not in on_a_cpu
    pretend_device(monkeypatch, "cuda", (10, 0))
    assert run(["check", *words]) == 0
    told, install = capsys.readouterr().out, "pip install flash-attn-4: faster here than torch_flash"
    assert "attention on this machine: mm_varlen by torch_flash (flash-attn-4 is not installed; " in told
    assert f"  note: {install}\n" in told
    assert run(["train", *words]) == 0
    log = capsys.readouterr().out
    assert "attention mm_varlen by torch_flash (flash-attn-4 is not installed; " in log
    assert f"faster {install}\n" in log
