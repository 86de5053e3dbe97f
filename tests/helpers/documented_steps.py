"""Follows a guide as it is written: its files are laid down, its commands are run, and what it shows is compared.

A fenced block `sh` holds commands, and the block `text` behind it what they print together, in which `…` stands for
anything. A block whose first line names a file after the language (```python a/b.py) is that file.
"""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from mindspeed_mm.cli import mm_convert
from mindspeed_mm.cli.main import guarded
from tests.helpers.runs import Said, kept, mm


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    file: str
    """The file that it is; empty for any other block."""
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page in their order."""
    fence = re.compile(r"^```(\w*) ?([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    for language, file, text in fence.findall(page.read_text(encoding="utf-8")):
        yield Block(language, file, text)


def command_lines(block: Block) -> list[str]:
    """The commands of a block, continuation lines joined and comments cut."""
    if block.language not in ("sh", "bash") or block.file:
        return []
    lines = (line.strip() for line in block.text.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def run_line(line: str) -> Said:
    """A command: `mm`, `mm-convert` and `python` in this process, any other in one of its own."""
    program, *words = shlex.split(line, comments=True)
    if program == "mm":
        return mm(*words)
    if program == "mm-convert":
        return kept(lambda: guarded(lambda: mm_convert.run(words)))
    if program == "python":
        return kept(lambda: run_python(words))
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=600, check=False)
    return Said(done.returncode, done.stdout, done.stderr)


def run_python(words: list[str]) -> int:
    """A script or `-m module`, with its arguments; its exit code."""
    is_module = words[0] == "-m"
    name, *rest = words[is_module:]
    folder = str(Path.cwd() if is_module else Path(name).resolve().parent)
    with mock.patch.object(sys, "argv", [name, *rest]), mock.patch.object(sys, "path", [folder, *sys.path]):
        try:
            if is_module:
                runpy.run_module(name, run_name="__main__")
            else:
                runpy.run_path(name, run_name="__main__")
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def fits(shown: str, printed: str) -> bool:
    """Whether a text is what a page shows, blanks aside."""
    parts = (re.escape(" ".join(part.split())) for part in shown.split("…"))
    return re.fullmatch(r"\s*.*?\s*".join(parts), " ".join(printed.split())) is not None


def follow(page: Path) -> list[str]:
    """Lay down the files of a page in the working directory and run its commands there; returns the commands.

    Raises:
        AssertionError: A command fails, or does not print what the page shows.
    """
    done: list[str] = []
    printed = ""
    for block in blocks(page):
        if block.file:
            path = Path(block.file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "text":
            assert fits(block.text, printed), f"{page.name} shows\n{block.text}\nand what is printed is\n{printed}"
        elif lines := command_lines(block):
            printed = ""
            for line in lines:
                said = run_line(line)
                assert said.code == 0, (page.name, line, said.out, said.err)
                printed += said.out
                done.append(line)
    return done
