"""`mm profile` and the analysis as a module: what they print, and how they end."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_mm.cli.main import run
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.params.tools_args import StaticProfile
from mindspeed_mm.fsdp.tools import profiler
from mindspeed_mm.fsdp.tools.memory_tracker import CATEGORIES
from mindspeed_mm.fsdp.tools.profile_request import read_request
from tests.helpers.tiny_run import make_tiny_run


def small_trace(path: Path) -> Path:
    events = [
        {"ph": "X", "cat": "user_annotation", "name": "mm.step 1", "pid": 1, "tid": 1, "ts": 0, "dur": 100},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 95},
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_trace_is_analysed_by_the_verb_and_by_the_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(small_trace(tmp_path / "a.json"))
    assert run(["profile", path]) == 0
    text = capsys.readouterr().out
    assert "bottleneck: compute-bound: 95% of the time is computation" in text
    assert profiler.main(["analyse", path]) == 0
    assert capsys.readouterr().out == text
    assert profiler.main(["analyse", path, "--json", "--top", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"]["0"]["shares"]["compute"] == pytest.approx(0.95)
    assert found["ranks"]["0"]["operators"] == [{"name": "aten::mm", "self_s": pytest.approx(95e-6), "calls": 1}]


def test_the_module_s_command_as_the_documents_write_it(tmp_path: Path) -> None:
    path = small_trace(tmp_path / "a.json")
    command = [sys.executable, "-m", "mindspeed_mm.fsdp.tools.profiler"]
    done = subprocess.run([*command, "analyse", path], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "bottleneck" in done.stdout


@pytest.mark.parametrize("words", [["--help"], ["analyse", "--help"], []])
def test_the_modules_help_has_two_examples(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert profiler.main(words) == 0
    assert capsys.readouterr().out.count("profiler analyse ") == 3


def test_wrong_words_are_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(small_trace(tmp_path / "a.json"))
    assert profiler.main(["analise", path]) == 2
    assert "Did you mean 'analyse'?" in capsys.readouterr().err
    assert run(["profile", path, "--steps", "2:3"]) == 2
    assert run(["profile", "run.yaml", "--steps", "3:3"]) == 2
    assert run(["profile", str(tmp_path / "nothing")]) == 4
    assert "does not exist" in capsys.readouterr().err


def test_a_configuration_is_recorded_and_analysed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    yaml = make_tiny_run(tmp_path, training={"train_iters": 8, "save": str(tmp_path / "mine"), "save_interval": 1})
    monkeypatch.chdir(tmp_path)
    assert run(["profile", str(yaml), "--steps", "2:4", "--json"]) == 0
    said = capfd.readouterr()
    found = json.loads(said.out)
    assert found["ranks"]["0"]["steps"] == 2
    assert found["traces"] == ["profiling/run-1/rank0_step2-3.trace.json.gz"]
    assert "step 3" not in said.out and "loss" in said.err
    assert not (tmp_path / "mine").exists(), "a profile saves nothing"
    assert run(["profile", str(yaml), "--out", "profiling/run-1"]) == 2
    assert "holds traces of another profile" in capfd.readouterr().err


@pytest.mark.slow
def test_two_ranks_are_recorded_and_compared(tmp_path: Path) -> None:
    yaml = make_tiny_run(tmp_path, training={"train_iters": 8, "micro_batch_size": 1})
    command = [sys.executable, "-m", "mindspeed_mm", "profile", yaml, "--nproc", "2", "--steps", "2:4", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sorted(found["ranks"]) == ["0", "1"]
    assert all(rank["communication_s"] > 0 for rank in found["ranks"].values())


PAGE = (Path(__file__).parents[2] / "docs" / "profiling.md").read_text(encoding="utf-8")


def test_the_pages_configurations_and_commands_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each YAML block of the page is accepted; its first commands, and its requests, are run as written."""
    yaml = make_tiny_run(tmp_path, training={"train_iters": 8})
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        (tmp_path / "own.yaml").write_text(yaml.read_text() + block)
        load_config(tmp_path / "own.yaml")
    commands = re.findall(r"^mm (.*)$", PAGE, flags=re.MULTILINE)
    record, modules, memory, analyse = [shlex.split(command) for command in commands]
    assert run(record) == run(analyse) == 0
    assert run(memory) == 0
    said = capfd.readouterr().out
    assert "bottleneck: " in said and "most held in all while a module was at work" in said
    assert modules[2] == "tools.profile.static_param.level=2"
    for request in re.findall(r"echo '(.*?)' >", PAGE):
        (tmp_path / "profile.json").write_text(request)
        asked = read_request(tmp_path / "profile.json", StaticProfile())
        assert (asked.steps, asked.settings.level, asked.start) == (2, 1, True)
    for category in CATEGORIES:
        assert category in PAGE
