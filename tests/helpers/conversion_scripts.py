"""Runs a script of `mm-convert` commands without a process for each: bash runs it with a command of that name that
writes down what it was given, and the commands are then run here, in order."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from mindspeed_mm.cli.mm_convert import run

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_script(name: str, *arguments: Path, scratch: Path, **environment: str) -> list[str]:
    """Run `examples/<name>/convert_<name>.sh`.

    Args:
        name: Of the example.
        arguments: Of the script.
        scratch: For the command of the same name.
        environment: Variables that the script reads.

    Returns:
        The subcommands that were run.
    """
    record, command = scratch / "commands.txt", scratch / "bin/mm-convert"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/usr/bin/env bash\nprintf "%q " "$@" >> {shlex.quote(str(record))}\necho >> {record}\n')
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    script = EXAMPLES / name / f"convert_{name}.sh"
    subprocess.run(
        ["bash", str(script), *map(str, arguments)], env={**os.environ, **environment, "PATH": path}, check=True
    )
    commands = [shlex.split(line) for line in record.read_text().splitlines()]
    for words in commands:
        assert run(words) == 0, words
    return [next(word for word in words[1:] if "_to_" in word or word == "resplit") for words in commands]
