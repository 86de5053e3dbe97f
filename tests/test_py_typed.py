"""Type checkers read the package's own annotations (PEP 561)."""

from __future__ import annotations

import subprocess
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.edge("BU8")
def test_the_package_says_that_it_is_typed() -> None:
    marker = files("mindspeed_mm") / "py.typed"
    assert marker.is_file()
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    # Hatchling takes every file of a package into a wheel that git does not ignore.
    assert build["targets"]["wheel"] == {"packages": ["mindspeed_mm"]}
    ignored = subprocess.run(["git", "-C", ROOT, "check-ignore", "mindspeed_mm/py.typed"], check=False)
    assert ignored.returncode != 0
