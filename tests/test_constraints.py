"""The two sets of packages that tests run with: each lies inside pyproject's ranges, and one of them at the floors."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FLOORS = ("torch", "torchvision", "transformers")
"""What decides which code runs; other packages are as new as these allow."""


def pins_of(name: str) -> dict[str, Version]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(package): Version(version) for package, version in (line.split("==") for line in lines)}


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dev = project["optional-dependencies"]["dev"]
    return [Requirement(each) for each in (*project["dependencies"], *dev)]


def floor_of(ranges: SpecifierSet) -> Version:
    return next(Version(each.version) for each in ranges if each.operator == ">=")


@pytest.mark.edge("F5")
@pytest.mark.parametrize("name", ["constraints.txt", "constraints-floor.txt"])
def test_every_pin_is_in_its_declared_range(name: str) -> None:
    pins = pins_of(name)
    for each in requirements():
        assert pins[canonicalize_name(each.name)] in each.specifier, each.name


@pytest.mark.edge("F4", "F5")
def test_the_floor_set_is_at_the_floors() -> None:
    pins, ranges = pins_of("constraints-floor.txt"), {each.name: each.specifier for each in requirements()}
    for name in FLOORS:
        assert pins[name].release[:2] == floor_of(ranges[name]).release[:2], name


@pytest.mark.edge("F5")
def test_the_hub_library_is_one_that_the_lowest_transformers_takes() -> None:
    """transformers 5.17 takes huggingface_hub before 2, which the tested set is beyond."""
    assert pins_of("constraints-floor.txt")["huggingface-hub"] in SpecifierSet(">=1.5,<2")
