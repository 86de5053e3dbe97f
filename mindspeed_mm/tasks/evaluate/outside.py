"""Packages that measure and want an environment of their own: its Python finds and runs them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.core.os_errors import with_home
from mindspeed_mm.core.started_python import run_module, run_script, safe_environment

_LONGEST_LOOK_S = 120.0
_LOOK = """
import importlib.metadata, importlib.util, json, sys
spec = importlib.util.find_spec(sys.argv[1])
try:
    version = importlib.metadata.version(sys.argv[1])
except importlib.metadata.PackageNotFoundError:
    version = "unknown"
print(json.dumps({"file": spec and spec.origin, "version": version}))
"""
"""A script that looks for a package and imports nothing of it."""


@dataclass(frozen=True)
class Wanted:
    """A package that is needed.

    Args:
        title: What people call it.
        module: Its name in Python.
        key: The option that names the Python of its environment.
        install: What installs it there.
    """

    title: str
    module: str
    key: str
    install: str


@dataclass(frozen=True)
class OutsidePackage:
    """A package that was found."""

    wanted: Wanted
    python: Path
    folder: Path
    """Where its modules are."""
    version: str

    def run(self, call: Call) -> int:
        """Run a program by this Python; the exit code. What it prints goes to standard error, for standard output is
        the command's own."""
        if isinstance(call.program, Path):
            words = run_script(self.python, call.program, call.words)
        else:
            words = run_module(self.python, call.program, call.words)
        return subprocess.run(words, env=safe_environment(call.environment), stdout=2, check=False).returncode


@dataclass(frozen=True)
class Call:
    """What a Python is to run, and what that finds in the environment: other users of a machine can see every word, so
    keys are not among them.

    Args:
        program: The name of a module, or a script.
        words: For it.
        environment: Further variables.
    """

    program: str | Path
    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def find_outside(wanted: Wanted, python: Path | None) -> OutsidePackage:
    """The package of an environment.

    Args:
        wanted: Which one.
        python: The environment's Python; None: this one.

    Raises:
        MachineError: There is no such Python, or the package is not installed there.
    """
    program = Path(sys.executable) if python is None else with_home(python)
    try:
        with tempfile.TemporaryDirectory() as place:
            script = Path(place) / "look.py"
            script.write_text(_LOOK, encoding="utf-8")
            looked = subprocess.run(
                run_script(program, script, [wanted.module]),
                env=safe_environment(),
                capture_output=True,
                timeout=_LONGEST_LOOK_S,
                check=True,
            )
        found = parse_json(looked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        what, way_out = "is not a Python that can be run", "Name the environment's, such as envs/other/bin/python."
        raise MachineError(what, where=str(program), key=wanted.key, way_out=way_out) from error
    if found["file"] is None:
        way_out = (
            f"Install it ({wanted.install}); if it is in a separate environment, name that environment's Python with "
            f"{wanted.key}."
        )
        raise MachineError(f"{wanted.title} is not installed", where=str(program), key=wanted.key, way_out=way_out)
    return OutsidePackage(wanted, program, Path(found["file"]).parent, found["version"])
