"""Examples of Megatron-style launches: sizes are those of the releases, plans those of the devices that they name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.provider.launch import read_launch
from mindspeed_mm.tasks.config import run_flags
from tests.helpers.released_examples import as_trained
from tests.helpers.released_layouts import release

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    path.parent.name: path for path in sorted((ROOT / "examples").glob("*/*_flags.sh")) if "extract" not in path.name
}
FAMILIES = {
    "qwen2vl": ("qwen2-vl-7b", 8),
    "qwen2.5vl": ("qwen2.5-vl-7b", 8),
    "qwen3vl": ("qwen3-vl-8b", 8),
    "internvl2.5": ("internvl2.5-4b", 8),
    "internvl3": ("internvl3-8b-hf", 8),
    "internvl3.5": ("internvl3.5-30b-a3b", 16),
    "glm4.1v": ("glm-4.1v-9b", 8),
    "glm4.5v": ("glm-4.5v-106b", 64),
    "deepseekvl2": ("deepseek-vl2-base", 16),
    "deepseekocr": ("deepseek-ocr", 8),
    "qwen2.5omni": ("qwen2.5-omni-7b", 8),
    "qwen3omni": ("qwen3-omni-30b-a3b", 16),
    "whisper": ("whisper-large-v3", 8),
    "wan2.1": ("", 8),
}
"""Folder of examples → what `tests/released` calls the size, if it is recorded, and the devices that are named."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout's examples, without models and data."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "mindspeed_mm").mkdir()
    shutil.copytree(ROOT / "mindspeed_mm" / "tools", tmp_path / "mindspeed_mm" / "tools")
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "NPROC", "NNODES", "TP", "PP", "CP", "EP", "MBS", "GRAD_ACC_STEP"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def folder_of(name: str) -> Path:
    """The model's folder that an example names."""
    launch = read_launch([str(SCRIPTS[name])], {})
    texts = [SCRIPTS[name].read_text(), *(path.read_text() for path in SCRIPTS[name].parent.glob("*_*.json"))]
    assert launch.entry
    found = [word.strip('",') for text in texts for word in text.split() if word.strip('",').startswith("models/")]
    return Path(*Path(found[0]).parts[:2])


def test_every_example_has_its_case() -> None:
    assert set(SCRIPTS) == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_example_fits_its_release(here: Path, name: str) -> None:
    """Sizes are those of the released folder, and the plan those of the devices."""
    size, devices = FAMILIES[name]
    if size:
        folder_of(name).mkdir(parents=True)
        config = as_trained(release(size).config)
        (folder_of(name) / "config.json").write_text(json.dumps(config))
    translated = run_flags([str(SCRIPTS[name].relative_to(ROOT))], {})
    arguments = translated.arguments
    assert arguments.model.model_name_or_path == str(folder_of(name))
    words = SCRIPTS[name].read_text().split("\n")[1]
    assert f"{devices} devices" in words
    sizes = resolve_parallel_sizes(arguments.parallel, devices)
    assert sizes.world == devices
    assert not any("not known" in note or "has no effect" in note for note in translated.notes), translated.notes
    if name not in ("wan2.1", "whisper", "deepseekocr"):
        assert arguments.model.freeze


STUB = '#!/bin/sh\necho "$@"\n'


@pytest.mark.parametrize("name", FAMILIES)
def test_a_shell_starts_what_is_read_here(here: Path, name: str) -> None:
    """The words that the script hands to torchrun are those that are worked out without a shell."""
    stub = here / "bin" / "torchrun"
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)
    script = f"examples/{name}/{SCRIPTS[name].name}"
    environment = {"PATH": f"{stub.parent}{os.pathsep}/usr/bin:/bin", "NODE_RANK": "0"}
    done = subprocess.run(
        ["bash", script, "--lr", "5e-6"], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    words = done.stdout.split()
    assert read_launch(words, {}) == read_launch([script, "--lr", "5e-6"], {})
    assert SCRIPTS[name].stat().st_mode & 0o111 and (ROOT / read_launch(words, {}).entry).is_file()
