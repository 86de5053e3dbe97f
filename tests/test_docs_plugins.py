"""docs/plugins.md as a reader follows it: the files that it shows are written, and every command runs on a tiny folder
of the same family."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.runs import losses, mm
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_rows

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```(?:python|yaml|sh)\n# ([\w/.]+)\n(.*?)```", PAGE, flags=re.DOTALL))
COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in block.splitlines()
    if line.startswith("mm ")
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's files, pictures and a tiny model at the page's path."""
    place = tmp_path_factory.mktemp("plugin")
    for name, text in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text, encoding="utf-8")
    make_tiny_qwen3_vl(place / "models" / "Qwen3-VL-2B-Instruct")
    make_rows(place / "data", count=8, images=(1,))
    (place / "data" / "pairs.tsv").write_text("".join(f"images/{n}_0.png\ta red box {n}\n" for n in range(8)))
    return place


def test_every_file_of_the_page_is_tried() -> None:
    assert set(FILES) == {
        "look.py", "my_vlm/modeling_my_vlm.py", "my_vlm/pairs_dataset.py", "my_vlm_config.yaml", "finetune_my_vlm.sh",
    }  # fmt: skip
    assert len(COMMANDS) == 6
    assert len(re.findall(r"^```(?:python|yaml|sh)$", PAGE, flags=re.MULTILINE)) == len(FILES) + 2


def run_commands(verbs: set[str]) -> None:
    for words in COMMANDS:
        if words[0] in verbs:
            said = mm(*words)
            assert said.code == 0, (words, said.out, said.err)


def test_the_page_is_followed(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [*sys.path])
    exec(compile(FILES["look.py"], "look.py", "exec"), {})
    shown = capsys.readouterr().out.splitlines()
    assert "pixel_values" in shown[0]
    assert {"model.language_model.layers.0", "model.visual.blocks.0"} <= set(shown)
    run_commands({"check", "data", "train", "export"})
    assert sorted(losses(place / "runs" / "my_vlm")) == [1]
    assert json.loads((place / "exported" / "config.json").read_text())["patch_dropout"] == 0.1


@pytest.mark.slow
def test_the_plan_is_verified_and_the_launch_script_trains(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [*sys.path])
    run_commands({"verify"})
    environment = {**os.environ, "NPROC": "2", "PYTHONPATH": f"{ROOT}:{place}", "OMP_NUM_THREADS": "1"}
    words = ["bash", "finetune_my_vlm.sh", "training.train_iters=2", "training.save=runs/launched"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(losses(place / "runs" / "launched")) == [1, 2]
