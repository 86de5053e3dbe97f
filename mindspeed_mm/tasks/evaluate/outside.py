"""Packages that measure and want an environment of their own: its Python finds and runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.core.os_errors import with_home

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
"""Looks for a package and imports nothing of it."""


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
        """Run this Python with words; the exit code. What it prints goes to standard error, for standard output is the
        command's own."""
        environment = {**os.environ, **call.environment}
        done = subprocess.run([str(self.python), *call.words], env=environment, stdout=2, check=False)
        return done.returncode


@dataclass(frozen=True)
class Call:
    """Words for a Python, and what they find in the environment: other users of a machine can see every word, so keys
    are not among them."""

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
        looked = subprocess.run(
            [str(program), "-c", _LOOK, wanted.module], capture_output=True, timeout=_LONGEST_LOOK_S, check=True
        )
        found = json.loads(looked.stdout)
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
