"""The border of the command: verbs imported when called, errors as lines, exit codes."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from mindspeed_mm.cli import main
from mindspeed_mm.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    MachineError,
    ModelFolderError,
    StoppedAfterSave,
    UsageError,
)
from mindspeed_mm.core.version import __version__
from mindspeed_mm.fsdp.utils import plugins


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the verb `train` do something else."""

    def install(action: Any) -> None:
        module = SimpleNamespace(command=click.Command("train", callback=action))
        monkeypatch.setattr(importlib, "import_module", lambda name: module)

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("MM_TRACEBACK", raising=False)
    return install


def raising(error: BaseException) -> Any:
    def action() -> None:
        raise error

    return action


def test_help_lists_every_verb_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    listed = re.findall(r"^  (\w+)  +\S", capsys.readouterr().out.partition("Commands:")[2], re.MULTILINE)
    assert listed[: len(main.VERBS)] == list(main.VERBS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("name", main.VERBS)
def test_every_verb_has_two_real_examples_and_an_option_for_machines(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert (
        len(re.findall(rf"^ +(?:\w+=\S+ )*(?:mm|torchrun .*) {name}\b", text.partition("Examples:")[2], re.MULTILINE))
        >= 2
    )
    assert "--json" in text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (ConfigError("x"), 2),
        (MachineError("x"), 3),
        (DataError("x"), 4),
        (ModelFolderError("x"), 4),
        (CheckpointError("x"), 4),
        (DivergedError("x"), 5),
        (StoppedAfterSave("x"), 75),
    ],
)
def test_exit_codes(error: Exception, code: int, verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    verb(raising(error))
    assert main.run(["train"]) == code
    assert capsys.readouterr().err == "x\n"


def test_an_error_nobody_foresaw_is_a_bug_and_says_where(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    verb(raising(ValueError("odd")))
    assert main.run(["train"]) == 1
    text = capsys.readouterr().err
    assert re.match(r"this is a bug: ValueError: odd \(.*test_main\.py:\d+\)\n", text)
    assert "Traceback" not in text


def test_an_error_in_a_plugin_is_no_bug_of_the_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd_plugin.py").write_text("def fail(rows):\n    return rows[0]\n")
    monkeypatch.setattr(plugins, "_OUTSIDE", set())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    plugins.import_plugin(["odd_plugin.py"])
    fail = sys.modules["odd_plugin"].fail
    assert main.guarded(lambda: fail([])) == 1
    told = capsys.readouterr().err
    assert told.startswith("the plugin's code fails: IndexError: list index out of range (")
    assert f"{tmp_path / 'odd_plugin.py'}:2" in told and "bug" not in told


def test_what_a_class_of_a_plugin_lacks_is_no_bug_of_the_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library asks a configuration for a field that the plugin's class has not: no line of the plugin is run."""
    (tmp_path / "poor_plugin.py").write_text("class Settings:\n    width = 3\n")
    monkeypatch.setattr(plugins, "_OUTSIDE", set())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    plugins.import_plugin(["poor_plugin.py"])
    settings = sys.modules["poor_plugin"].Settings()
    assert main.guarded(lambda: settings.depth) == 1
    told = capsys.readouterr().err
    assert told.startswith("the plugin's code fails: AttributeError: 'Settings' object has no attribute 'depth' (")
    assert f"{tmp_path / 'poor_plugin.py'}, class Settings" in told and "bug" not in told


@pytest.mark.parametrize("words", [["train", "--traceback"], ["--traceback", "train"]])
def test_the_traceback_is_shown_when_asked_for(
    words: list[str], verb: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MM_TRACEBACK", "0")
    verb(raising(DataError("x")))
    assert main.run(words) == 4
    assert os.environ["MM_TRACEBACK"] == "1"  # the ranks that a command starts show theirs
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_the_traceback_by_environment(
    verb: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MM_TRACEBACK", "1")
    verb(raising(DataError("x")))
    main.run(["train"])
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "prefix"), [("0", ""), ("3", "[rank 3] ")])
def test_other_ranks_say_who_they_are(
    rank: str, prefix: str, verb: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    verb(raising(DataError("one\ntwo")))
    main.run(["train"])
    assert capsys.readouterr().err == f"{prefix}one\n{prefix}two\n"


def test_interrupted(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    verb(raising(KeyboardInterrupt()))
    assert main.run(["train"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_verb_may_end_the_process_itself(verb: Any) -> None:
    verb(raising(SystemExit(75)))
    with pytest.raises(SystemExit) as caught:
        main.run(["train"])
    assert caught.value.code == 75


def test_main_ends_the_process_with_the_code() -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["nonsense"])
    assert caught.value.code == 2


@pytest.mark.parametrize("module", ["mindspeed_mm", "mindspeed_mm.cli.main"])
def test_python_m_is_the_command(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "nonsense"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert "unknown command 'nonsense'" in done.stderr


@pytest.mark.edge("U5")
def test_libraries_keep_quiet_before_our_output(tmp_path: Path) -> None:
    code = (
        "import warnings\n"
        "from mindspeed_mm.cli import main\n"
        "main.run(['--version'])\n"
        "warnings.warn('of later versions', FutureWarning)\n"
        "warnings.warn('of a library', UserWarning)\n"
        "from transformers.utils import logging\n"
        "logging.get_logger('transformers.any').warning('Model config')\n"
        "list(logging.tqdm(range(3), desc='Loading weights'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0
    said = done.stdout + done.stderr
    assert "of a library" in said
    assert not [word for word in ("of later versions", "Model config", "Loading weights") if word in said]


HEAVY = ("torch", "transformers", "numpy", "datasets", "PIL")


@pytest.mark.parametrize(
    ("words", "also_absent"),
    [
        (["--help"], ("pydantic", "ruamel")),
        (["train", "--help"], ()),
        (["check", "--help"], ()),
        (["check", "--config-only", "{config}"], ()),
        (["config", "{config}"], ()),
        (["schema", "training.lr"], ()),
    ],
)
def test_answers_without_heavy_imports(words: list[str], also_absent: tuple[str, ...], tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("training: {lr: 1e-5}\n")
    code = (
        "import sys\nfrom mindspeed_mm.cli.main import run\n"
        f"assert run({[word.format(config=config) for word in words]!r}) == 0\n"
        f"print([name for name in {HEAVY + also_absent!r} if name in sys.modules], file=sys.stderr)\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert finished.stderr.strip() == "[]"


@pytest.mark.edge("BU7")
def test_what_the_words_alone_tell_is_refused_without_heavy_imports(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    judge = ["--judge", "http://127.0.0.1:1/v1", "--judge-model", "large"]
    commands = [
        ["serve", "model", "--host", "0.0.0.0"],
        ["serve", "model", "--media-folder", "none"],
        ["serve", "model", "--adapter", "a=b", "--engine", "vllm"],
        ["serve", "model", "--adapter", "model=b"],
        ["serve", "model", "--adapter", "a=b", "--engine", "continuous"],
        ["serve", "model", "--plan", "there", "--nproc", "2", "--engine", "sglang"],
        ["infer", "model", "--data", "none", "--out", "answers"],
        ["infer", "model", "--data", "there", "--out", "answers", "--adapter", "a"],
        ["infer", "model", "--data", "there", "--out", "answers", "--adapter", "a=b", "--lora", "there"],
        ["infer", "model", "--prompt", "a", "--config", "none"],
        ["evaluate", "model", "--data", "none"],
        ["evaluate", "model", "--data", "there", "--against", "none"],
        ["evaluate", "model", "--data", "there", "--benchmark", "docvqa_val", *judge],
        ["evaluate", "model", "--generated", "--vbench", ","],
        ["evaluate", "model", "--harness", "lmms-eval"],
        ["infer", "runs/nothing", "--prompt", "a"],
        ["serve", "Qwen/Qwen3-VL-2B-Instruct"],
    ]
    code = (
        f"import sys\nfrom mindspeed_mm.cli.main import run\nprint([run(words) for words in {commands!r}])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=tmp_path)
    codes, heavy = done.stdout.splitlines()
    assert set(codes) <= set("[], 24") and heavy == "[]", done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(commands) and all(line.endswith(".") or "--help" in line for line in lines), done.stderr


@pytest.mark.parametrize(("rank", "told"), [("0", "warning: 2 rows repeat another\n"), ("1", "")])
def test_our_warnings_are_one_line_of_the_first_rank(rank: str, told: str) -> None:
    code = (
        "import sys, warnings; from mindspeed_mm.cli import main; "
        "warn = lambda *_, **__: warnings.warn_explicit('2 rows repeat another', UserWarning, main.__file__, 1); "
        "main.cli.main = warn; "
        "sys.exit(main.run([]))"
    )
    environment = os.environ | {"RANK": rank}
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=environment
    )
    assert (finished.returncode, finished.stderr) == (0, told)


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("training: {lr: 1e-5}\n")
    command = f"{sys.executable} -m mindspeed_mm config {config} | head -1; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    finished = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600, env=environment)
    assert finished.returncode == 0
    assert finished.stderr == ""
