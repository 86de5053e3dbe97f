"""How another Python is started: neither it nor those that it starts import what merely lies in the working directory.

`python -m`, `-c` and a script put the working directory, or the script's, before everything else. `-P` and
`PYTHONSAFEPATH` switch that off from Python 3.11 on; Pythons of other environments, which may be older, get a few lines
that do the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SAFE_PATH = "PYTHONSAFEPATH"
_START = """
import sys
sys.path[:] = [place for place in sys.path if place]
import runpy
way, *sys.argv = sys.argv[1:]
if way == "module":
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""`-c` puts an empty place first; nothing but built-in modules is imported while it is there."""


def own_python(words: Sequence[str]) -> list[str]:
    """The command that runs this Python with these words: `-m MODULE …` or a script."""
    return [sys.executable, "-P", *words]


def run_module(python: Path, module: str, words: Sequence[str]) -> list[str]:
    """The command that runs a module by a Python of any version."""
    return [str(python), "-c", _START, "module", module, *words]


def run_script(python: Path, script: Path, words: Sequence[str]) -> list[str]:
    """The command that runs a script by a Python of any version."""
    return [str(python), "-c", _START, "script", str(script), *words]


def safe_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for it.

    Args:
        more: Further variables.
    """
    return {**os.environ, SAFE_PATH: "1", **(more or {})}
