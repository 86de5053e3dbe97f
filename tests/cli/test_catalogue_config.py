"""Bad configurations and command lines: each ends with its exit code and a line with place, value and remedy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mindspeed_mm.cli.main import run

Builder = Callable[[Path], list[str]]

CHECK = ["check", "--config-only"]


def yaml(text: str | bytes, *words: str, command: tuple[str, ...] = ("check", "--config-only")) -> Builder:
    """Write `run.yaml` and check it."""

    def build(folder: Path) -> list[str]:
        path = folder / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return [command[0], str(path), *command[1:], *words]

    return build


def missing_file(folder: Path) -> list[str]:
    (folder / "digits.yaml").touch()
    return [*CHECK, str(folder / "digit.yaml")]


def broken_plugin(folder: Path) -> list[str]:
    (folder / "broken_plugin.py").write_text("import a_library_that_is_not_there\n")
    return yaml("training: {plugin: [broken_plugin]}\n", command=("check",))(folder)


def save_is_a_file(folder: Path) -> list[str]:
    (folder / "runs").touch()
    (folder / "broken.py").write_text("raise ValueError('no')\n")
    # The plugin that fails keeps the check from building a model, which this case does not need.
    return yaml("training: {save: runs/one, plugin: [broken]}\n", command=("check",))(folder)


def alias_bomb() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    return "\n".join([*lines, *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))])


PYTHON_TAG = "training: !!python/object/apply:pathlib.Path.touch [{marker}]\n"


@dataclass(frozen=True)
class Case:
    id: str
    build: Builder
    message: str
    code: int = 2


CASES = [
    # A. The file
    Case("A1 absent", missing_file, r"digit\.yaml  no such file\. Did you mean '.*digits\.yaml'\?"),
    Case("A1 a folder", lambda folder: [*CHECK, str(folder)], r"a folder, not a file"),
    Case("A2 empty", yaml(""), r"run\.yaml:1:1  the file is empty"),
    Case("A2 only comments", yaml("# nothing\n"), r"run\.yaml:1:1  the file is empty"),
    Case("A3 list", yaml("- a\n"), r"run\.yaml:1:1  the file does not hold sections"),
    Case("A3 scalar", yaml("hello\n"), r"the file does not hold sections"),
    Case(
        "A4 tab",
        yaml("model:\n\tmodel_id: x\n"),
        r"run\.yaml:2:1  a tab indents this line\. YAML is indented with spaces",
    ),
    Case("A5 latin-1", yaml(b"model: {model_id: qwen\xe9}\n"), r"byte 0xe9 at offset 22 is not UTF-8"),
    Case("A5 NUL", yaml(b"model: \0\n"), r"NUL byte at offset 7"),
    Case("A6 two documents", yaml("model: {}\n---\nmodel: {}\n"), r"run\.yaml:2:1  a second document"),
    Case(
        "A7 duplicate key",
        yaml("training:\n  lr: 1e-5\n  seed: 1\n  lr: 2e-5\n"),
        r"run\.yaml:4:3  training\.lr  'lr' is given twice, first in line 2",
    ),
    Case(
        "A8 unknown key", yaml("training:\n  learning_rat: 1\n"), r"run\.yaml:2:3 .*unknown key\. Did you mean 'lr'\?"
    ),
    Case("A9 wrong section", yaml("model:\n  lr: 1\n"), r"run\.yaml:2:3 .*It belongs elsewhere: training\.lr"),
    Case("A10 text for a number", yaml("training: {lr: fast}\n"), r"training\.lr  'fast' is not a number"),
    Case("A11 nan", yaml("training: {lr: .nan}\n"), r"training\.lr  nan is not a finite number"),
    Case(
        "A11 huge",
        yaml("training: {train_iters: 1e30}\n"),
        r"train_iters  a number of 31 digits is out of range: at most",
    ),
    Case("A11 negative", yaml("training: {lr: -1}\n"), r"training\.lr  -1\S* is out of range\. It must be at least 0"),
    Case(
        "A11 no steps", yaml("training: {train_iters: 0}\n"), r"train_iters  0 is out of range\. It must be at least 1"
    ),
    Case("A12 save: no", yaml("training: {save: no}\n"), r"training\.save  'no' is not a path.*null"),
    Case("A12 save: false", yaml("training: {save: false}\n"), r"training\.save  false is not a text"),
    Case("A12 version", yaml("version: 010\n"), r"run\.yaml:1:1  version  unknown key"),
    Case("A12 time", yaml("training: {lr: 12:30}\n"), r"training\.lr  '12:30' is not a number"),
    Case("A13 bool for steps", yaml("training: {train_iters: true}\n"), r"train_iters  true is not a whole number"),
    Case("A14 python tag", yaml(PYTHON_TAG.format(marker="pwned")), r"run\.yaml:1:11  tag '!!python/.*is refused"),
    Case("A15 alias bomb", yaml(alias_bomb()), r"once aliases are written out"),
    Case("A15 nesting", yaml("a: " + "[" * 30_000), r"nested deeper than 64"),
    Case("A15 block nesting", yaml("".join("  " * n + "a:\n" for n in range(100))), r"nested deeper than 64"),
    Case("A15 size", yaml("# " + "x" * 1_000_001), r"1000003 bytes; a configuration has at most"),
    Case(
        "A18 adapters on nothing",
        yaml("model: {freeze: ['*']}\ntraining: {lora: {enable: true}}\n"),
        r"model\.freeze  '\*' freezes everything, the adapters of training\.lora\.enable included",
    ),
    Case("A19 plugin", broken_plugin, r"'broken_plugin' cannot be imported: .*a_library_that_is_not_there"),
    Case(
        "A20 model id", yaml("model: {model_id: qwen3_lv}\n"), r"'qwen3_lv' is not registered\. Did you mean 'qwen3_vl'"
    ),
    Case(
        "A20 dataset type",
        yaml("data: {dataset_param: {dataset_type: hugingface}}\n"),
        r"'hugingface' is not registered\. Did you mean 'huggingface'\? Known ids: .*qwen3_asr",
    ),
    # several at once, in the order of the file
    Case(
        "all at once",
        yaml("parallel:\n  tensor_parallel_sise: 1\n  fsdp_plan:\n    param_dtype: bf61\n"),
        r"run\.yaml: 2 problems\n.*:2:3 .*'tensor_parallel_size'\?\n.*:4:18 .*'bf61' is not .*Did you mean 'bf16'\?",
    ),
    # B. The command line
    Case("B21 unknown verb", lambda folder: ["traim", "run.yaml"], r"unknown command 'traim'\. Did you mean 'train'\?"),
    Case(
        "B21 override with dashes",
        yaml("model: {}\n", "--training.lrr=3"),
        r"No such option.*--training\.lrr.* Overrides take no dashes: training\.lrr=VALUE",
    ),
    Case("B21 unknown option", yaml("model: {}\n", "--config-onyl"), r"No such option.*--config-onyl.*--config-only"),
    Case("B21 unknown override", yaml("model: {}\n", "training.lrr=3"), r"command line  training\.lrr .*mean 'lr'\?"),
    Case("B22 type", yaml("model: {}\n", "training.train_iters=many"), r"command line .*'many' is not a whole number"),
    Case("B22 no value", yaml("model: {}\n", "training.lr"), r"'training\.lr' is not section\.key=value"),
    Case("B23 run folder is a file", save_is_a_file, r"training\.save +'\S+/runs' is a file, not a folder"),
    # I. Sizes
    Case("I99 sizes", yaml("parallel: {tensor_parallel_size: 3}\n", "--nproc", "8"), r"3 does not divide the 8 ranks"),
    Case("I101 zero", yaml("parallel: {tensor_parallel_size: 0}\n"), r"0 is out of range\. It must be at least 1"),
    Case(
        "I101 negative", yaml("parallel: {fully_shard_parallel_size: -2}\n"), r"-2 is neither auto nor a whole number"
    ),
    Case("I101 fraction", yaml("parallel: {ring_attention_size: 1.5}\n"), r"1\.5 is not a whole number"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    code = run(case.build(tmp_path))
    printed = capsys.readouterr()
    output = printed.out + printed.err
    assert re.search(case.message, output), output
    assert "Traceback" not in output
    assert code == case.code


def test_a_refused_tag_ran_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(yaml(PYTHON_TAG.format(marker="pwned"))(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("training: {lr: 1e-5}\n", "training.lr", "1.0e-05"),
        ("training: {lr: '1e-5'}\n", "training.lr", "1.0e-05"),
        ("training: {seed: 010}\n", "training.seed", "10"),
        ("training: {use_deter_comp: yes}\n", "training.use_deter_comp", "true"),
    ],
)
def test_values_are_shown_as_they_were_read(
    text: str, key: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(yaml(text, command=("config",))(tmp_path)) == 0
    assert re.search(rf"\n  {key.rpartition('.')[2]}: {re.escape(value)} +# .*run\.yaml:1:", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["A1 absent", "A4 tab", "A8 unknown key", "B21 unknown verb", "B22 type"])
def test_as_a_real_command(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.id == name)
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MM_TRACEBACK")}
    command = [sys.executable, "-m", "mindspeed_mm", *case.build(tmp_path)]
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert re.search(case.message, finished.stdout + finished.stderr)
    assert "Traceback" not in finished.stderr
    assert finished.returncode == case.code
