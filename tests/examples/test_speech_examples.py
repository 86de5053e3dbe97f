"""The examples of CosyVoice3 and Fun-ASR: scripts start what they name, and configurations are read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mindspeed_mm.cli.main import run

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {
    "cosyvoice3/finetune_cosyvoice3_0.5B.sh": ("tasks/cosyvoice3/train.py", "cosyvoice3/cosyvoice3_0.5B_config.yaml"),
    "funasr/finetune_funasr_nano.sh": ("tasks/funasr/trainer.py", "funasr/funasr_nano_config.yaml"),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_start_the_entries_that_they_name(script: str, tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$*"\n')
    (tmp_path / "torchrun").chmod(0o755)
    words = ["bash", str(EXAMPLES / script), "training.lr=5e-6"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NPROC": "2"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=True)
    entry, config = SCRIPTS[script]
    expected = f"--nproc-per-node 2 mindspeed_mm/fsdp/{entry} examples/{config} training.lr=5e-6"
    assert done.stdout.strip() == expected
    assert (EXAMPLES.parent / "mindspeed_mm/fsdp" / entry).is_file()


@pytest.mark.parametrize("config", [config for _, config in SCRIPTS.values()])
def test_configurations_are_read(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(EXAMPLES / config), "--config-only"]) == 0, capsys.readouterr().out
