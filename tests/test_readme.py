"""Commands in the README and the examples exist as written: verbs, options and arguments parse, and files are there."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import click
import pytest

from mindspeed_mm.cli.main import VERBS, run

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]


def commands(page: Path) -> list[str]:
    """Lines that start with `mm`, continuation lines joined, comments cut."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(r"^\s*(mm [a-z][^#\n]*)", text, flags=re.MULTILINE)


ALL = [(page, command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize(("page", "command"), ALL, ids=[f"{p.parent.name}: {c.split()[1]}" for p, c in ALL])
def test_command_parses(page: Path, command: str) -> None:
    _, verb, *words = shlex.split(command)
    assert verb in VERBS
    program: click.Command = importlib.import_module(f"mindspeed_mm.cli.{verb}").command
    if isinstance(program, click.Group):  # mm data check
        verb, *words = words
        program = program.commands[verb]
    program.make_context(verb, words)


def test_every_verb_is_shown_somewhere() -> None:
    shown = {command.split()[1] for _, command in ALL}
    assert shown == set(VERBS)


def test_a_wrong_option_would_be_found() -> None:
    program = importlib.import_module("mindspeed_mm.cli.train").command
    with pytest.raises(click.UsageError):
        program.make_context("train", ["run.yaml", "--nprocs", "2"])


def test_example_configurations_pass_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted((ROOT / "examples").glob("*/*.yaml")):
        assert run(["check", str(path), "--config-only"]) == 0, capsys.readouterr().err


@pytest.mark.edge("U7")
def test_recipes_of_the_readme_pass_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipes = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [("lora:" in text, "quantize:" in text) for text in recipes] == [(False, False), (True, False), (True, True)]
    for text in recipes:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        assert run(["check", str(path), "--config-only"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.parent.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE):
        assert f"\n{target}:" in makefile
