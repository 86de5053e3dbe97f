"""No Python that is started imports what lies in the working directory."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_mm.core.started_python import SAFE_PATH, own_python, run_module, run_script, safe_environment
from mindspeed_mm.core.version import __version__
from mindspeed_mm.tasks.evaluate.outside import Call, Wanted, find_outside
from mindspeed_mm.tasks.launch import rank_start
from mindspeed_mm.tasks.verify.ranks import _without_accelerators
from tests.helpers.stub_harnesses import install_stubs

PACKAGE = Path(__file__).parents[2] / "mindspeed_mm"
TRAPS = ("json", "runpy", "argparse", "pathlib", "multiprocessing", "mindspeed_mm", "lmms_eval", "vlmeval", "vbench")


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules of these names; the file that they write when they are imported."""
    folder, sprung = tmp_path / "trap", tmp_path / "sprung"
    for name in TRAPS:
        (folder / name).mkdir(parents=True)
        for file in ("__init__.py", "__main__.py"):
            (folder / name / file).write_text(f"open({str(sprung)!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(folder)
    return sprung


@pytest.mark.edge("BS7")
def test_the_trap_works(trap: Path) -> None:
    subprocess.run([sys.executable, "-m", "lmms_eval"], check=True)
    assert trap.read_text() == "lmms_evallmms_eval"


@pytest.mark.edge("BS7")
def test_a_harness_is_looked_for_and_run_outside_of_the_working_directory(
    trap: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    python = install_stubs(tmp_path / "environment")
    package = find_outside(Wanted("lmms-eval", "lmms_eval", "--harness-python", "pip"), python)
    assert package.folder == tmp_path / "environment/site/lmms_eval"
    assert package.run(Call("lmms_eval", ["--help"])) == 0
    script = tmp_path / "scripts" / "start.py"
    script.parent.mkdir()
    script.write_text(
        "import json, sys, subprocess\nsys.exit(subprocess.run([sys.executable, '-c', 'import json']).returncode)"
    )
    assert package.run(Call(script, ["a", "b"])) == 0
    assert "--log_samples" in capfd.readouterr().err and not trap.exists()


@pytest.mark.edge("BS7")
@pytest.mark.parametrize("is_old", [False, True])
def test_words_of_a_program_arrive(trap: Path, tmp_path: Path, is_old: bool) -> None:
    """Also where the Python knows neither `-P` nor the variable."""
    script, environment = tmp_path / "said.py", safe_environment({"MINE": "1"})
    script.write_text(
        "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ['MINE'], __name__, sys.path[0]]))"
    )
    if is_old:
        del environment[SAFE_PATH]
    words = run_script(Path(sys.executable), script, ["a b", "-m"])
    said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.startswith('[["a b", "-m"], "1", "__main__", "/')
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "mine.py").write_text(script.read_text())
    environment["PYTHONPATH"] = str(tmp_path / "place")
    words = run_module(Path(sys.executable), "mine", ["a b", "-m"])
    said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.startswith('[["a b", "-m"], "1", "__main__", "/') and not trap.exists()


@pytest.mark.edge("BS7")
def test_a_server_of_ours_imports_what_this_process_does(trap: Path) -> None:
    environment = safe_environment(rank_start.imports_of_this_process(os.environ))
    words = own_python([rank_start.__file__, "--version"])
    said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    assert __version__ in said and not trap.exists()
    with _without_accelerators():  # what ranks of mm verify inherit
        assert os.environ[SAFE_PATH] == "1"
    assert os.environ.get(SAFE_PATH) != "1"


STARTERS = {"run", "Popen", "call", "check_call", "check_output"}
NO_PYTHON = {
    "fsdp/train/run/record.py": "git",
    "checkpoint/megatron/pt_reading.py": "-I: isolated",
    "tasks/doctor/doctor.py": "nvidia-smi",
}
SAFE = ("safe_environment(", "SAFE_PATH")


def unsafe_starts(source: str) -> Iterator[int]:
    """Lines that start processes, or make processes import anew, in functions that say nothing of a safe path."""
    tree = ast.parse(source)
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        text = ast.unparse(function)
        for node in ast.walk(function):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            starts = called.startswith(("subprocess.", "os.exec", "os.spawn", "os.posix_spawn", "asyncio.create_sub"))
            starts = starts and (not called.startswith("subprocess.") or called.partition(".")[2] in STARTERS)
            anew = called.endswith("get_context") and any(
                isinstance(word, ast.Constant) and word.value in ("spawn", "forkserver") for word in node.args
            )
            names = text if starts else source
            if (starts or anew) and not any(word in names for word in SAFE):
                yield node.lineno


@pytest.mark.edge("BS7")
def test_each_start_of_a_process_in_the_package_is_safe() -> None:
    assert list(unsafe_starts("def f():\n    subprocess.run([sys.executable, '-m', 'x'])")) == [2]
    assert list(unsafe_starts("def f():\n    get_context('spawn')")) == [2]
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        inside, source = path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")
        if "subprocess" in source or "get_context" in source or "os.exec" in source:
            found[inside] = list(unsafe_starts(source))
    assert {inside for inside, lines in found.items() if lines} == NO_PYTHON.keys()
    assert '"-I"' in (PACKAGE / "checkpoint/megatron/pt_reading.py").read_text()
