"""Commands in the README and the examples exist as written: verbs, options and arguments parse, and files are there."""

from __future__ import annotations

import importlib
import io
import json
import re
import shlex
from pathlib import Path

import click
import pytest

from mindspeed_mm.cli.main import VERBS, run
from tests.helpers.runs import mm
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_rows

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
    ROOT / "benchmarks" / "README.md",
]
FINE_TUNE = ROOT / "docs" / "fine-tune.md"
MOST_LINES, MOST_BYTES = 150, 12_000


def commands(page: Path) -> list[str]:
    """Lines that start with `mm`, continuation lines joined, comments cut."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(r"^\s*(mm [a-z][^#\n]*)", text, flags=re.MULTILINE)


ALL = [(page, command) for page in PAGES for command in commands(page)]


def parse(command: str) -> None:
    _, verb, *words = shlex.split(command)
    assert verb in VERBS
    program: click.Command = importlib.import_module(f"mindspeed_mm.cli.{verb}").command
    if isinstance(program, click.Group):  # mm data check
        verb, *words = words
        program = program.commands[verb]
    program.make_context(verb, words)


def test_commands_parse() -> None:
    wrong = {}
    for page, command in ALL:
        try:
            parse(command)
        except (click.ClickException, AssertionError, KeyError) as error:
            wrong[f"{page.relative_to(ROOT)}: {command}"] = repr(error)
    assert wrong == {}


def test_every_verb_is_shown_somewhere() -> None:
    shown = {command.split()[1] for _, command in ALL}
    assert shown == set(VERBS)


def test_a_wrong_option_would_be_found() -> None:
    program = importlib.import_module("mindspeed_mm.cli.train").command
    with pytest.raises(click.UsageError):
        program.make_context("train", ["run.yaml", "--nprocs", "2"])


def test_example_configurations_pass_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    # fsdp2_config files belong to launches by flags, which tests/examples/test_flag_examples.py reads.
    paths = [path for path in sorted((ROOT / "examples").glob("*/*.yaml")) if "fsdp2_config" not in path.name]
    for path in paths:
        assert run(["check", str(path), "--config-only"]) == 0, capsys.readouterr().err


def recipes_of(page: Path) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.edge("U7")
def test_recipes_pass_the_check_and_full_fine_tuning_freezes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (front,), recipes = recipes_of(ROOT / "README.md"), recipes_of(FINE_TUNE)
    assert [("lora:" in text, "quantize:" in text) for text in recipes] == [(False, False), (True, False), (True, True)]
    assert front == recipes[0] and "freeze" not in front
    for text in recipes:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        assert run(["check", str(path), "--config-only"]) == 0, capsys.readouterr().out


@pytest.mark.edge("U7")
def test_a_fine_tuner_finds_families_and_recipes_before_all_else() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= MOST_LINES and len(text.encode()) <= MOST_BYTES
    sections = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert sections[:3] == ["Install", "Quick start on a laptop CPU", "Your own model and rows"]
    assert all(name in text.partition("## ")[0] for name in ("Qwen-VL", "LoRA or QLoRA", "docs/data.md"))
    page = FINE_TUNE.read_text(encoding="utf-8")
    assert page.index("pretrained_lora_path") < page.index("frozen_adapters")
    assert re.search(r"\bplans?\b.*", page)[0].startswith("plan (how work is split over devices)")


@pytest.mark.slow
@pytest.mark.edge("U7")
def test_commands_of_the_recipe_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first recipe to the exported folder, on a tiny model of the same family."""
    text = FINE_TUNE.read_text(encoding="utf-8")
    _, _, section = text.partition("## From the check to the exported folder\n")
    recipe = re.search(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    commands = re.search(r"```sh\n(.*?)```", section, flags=re.DOTALL)
    assert recipe is not None and commands is not None
    make_tiny_qwen3_vl(tmp_path / "models" / "Qwen3-VL-2B-Instruct")
    rows = make_rows(tmp_path / "data", count=8, images=(1,))
    (tmp_path / "data" / "test.jsonl").write_text("".join(rows.read_text().splitlines(keepends=True)[:2]))
    (tmp_path / "a.png").write_bytes((tmp_path / "data" / "images" / "0_0.png").read_bytes())
    published = {"questionId": 1, "question": "what?", "image": "a.png", "answers": ["a"]}
    (tmp_path / "sets" / "DocVQA").mkdir(parents=True)
    (tmp_path / "sets" / "DocVQA" / "a.png").write_bytes((tmp_path / "a.png").read_bytes())
    (tmp_path / "sets" / "DocVQA" / "val_v1.0_withQT.json").write_text(json.dumps({"data": [published]}))
    (tmp_path / "run.yaml").write_text(recipe[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("What is it?\n"))  # of mm chat, which then ends
    for line in commands[1].splitlines():
        _, *words = shlex.split(line, comments=True)
        words = ["1" if before == "--nproc" else word for before, word in zip(["", *words], words, strict=False)]
        if words[0] == "serve":  # has tests of its own: it does not end by itself
            continue
        if "runs/asr" in words:  # any model whose answers are words
            (tmp_path / "runs" / "asr").symlink_to(tmp_path / "runs" / "mine")
        said = mm(*words)
        assert said.code == 0, (line, said.err)
    assert (tmp_path / "exported" / "config.json").is_file()


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE):
        assert f"\n{target}:" in makefile
