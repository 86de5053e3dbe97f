"""`checkpoint.…`, through the link at the root of the checkout, is the same package as `mindspeed_mm.checkpoint.…`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("first", ["checkpoint", "mindspeed_mm.checkpoint"])
def test_one_module_under_two_names(first: str) -> None:
    code = f"""
import importlib
importlib.import_module("{first}.alias")
import checkpoint, checkpoint.alias, mindspeed_mm.checkpoint as real
import mindspeed_mm.checkpoint.alias as real_alias
from checkpoint.alias import AliasFinder
from mindspeed_mm.checkpoint.alias import AliasFinder as RealFinder
print(checkpoint is real, checkpoint.alias is real_alias, AliasFinder is RealFinder)
print(checkpoint.alias.__spec__.name, real.__spec__.name)
try:
    import checkpoint.nothing_of_this_name
except ModuleNotFoundError:
    print("absent")
"""
    assert _python("-c", code).splitlines() == [
        "True True True",
        "mindspeed_mm.checkpoint.alias mindspeed_mm.checkpoint",
        "absent",
    ]


def test_modules_run_under_the_alias() -> None:
    assert _python("-m", "checkpoint.alias") == ""


def test_the_link_is_relative_and_points_into_the_package() -> None:
    assert (ROOT / "checkpoint").readlink() == Path("mindspeed_mm/checkpoint")
