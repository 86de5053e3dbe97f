"""The scripts of the examples convert a tiny folder there and back."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_mm.cli.mm_convert import run
from tests.helpers.megatron_models import save_tiny

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPTS = {
    "qwen2vl/convert_qwen2vl.sh": "qwen2_vl",
    "qwen2.5vl/convert_qwen2.5vl.sh": "qwen2_5_vl",
    "qwen2.5omni/convert_qwen2.5omni.sh": "qwen2_5_omni",
    "qwen3vl/convert_qwen3vl_megatron.sh": "qwen3_vl_moe",
    "internvl3/convert_internvl3.sh": "internvl_chat",
    "glm4.1v/convert_glm4.1v.sh": "glm4v",
    "deepseekvl2/convert_deepseekvl2.sh": "deepseek_vl2",
}
DIVISION = {"LLM": "[[2,3]]", "VIT": "[[3,0]]", "AUDIO": "[[4,0]]", "TP": "2", "EP": "2"}


def commands_of(script: Path, environment: dict[str, str], folder: Path) -> list[list[str]]:
    """What a script calls `mm-convert` with, written down by a program of that name."""
    log, program = folder / "called", folder / "bin/mm-convert"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" -- >> '{log}'\n")
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    subprocess.run(["bash", str(script)], env={**os.environ, **environment, "PATH": path}, check=True, timeout=600)
    return [call.splitlines() for call in log.read_text().split("--\n") if call]


IN_DEFAULT_RUN = "qwen3vl/convert_qwen3vl_megatron.sh"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == IN_DEFAULT_RUN else pytest.mark.slow) for name in SCRIPTS]
)
def test_a_script_converts_there_and_back(name: str, tmp_path: Path) -> None:
    folder = save_tiny(SCRIPTS[name], tmp_path / "model")
    commands = commands_of(EXAMPLES / name, {"MODEL": str(folder), **DIVISION}, tmp_path)
    assert [words[1] for words in commands] == ["hf_to_mm", "mm_to_hf"]
    for words in commands:
        assert run(words) == 0
    ours, theirs = (load_file(f"{folder}{suffix}/model.safetensors") for suffix in ("-exported", ""))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())
    ranks = {path.parent.name for path in Path(f"{folder}-mm").glob("release/*/model_optim_rng.pt")}
    assert len(ranks) == (8 if "EP=" in (EXAMPLES / name).read_text() else 4)
