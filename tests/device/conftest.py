"""The room of the simulated accelerator: skipped where `torch_openreg` is not installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.simulated_device import is_installed, races, turn_on_checker

HERE = Path(__file__).parent


def pytest_configure() -> None:
    """The checker reads the environment once, when the first memory is taken."""
    if is_installed():
        turn_on_checker()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder; there are more than ten thousand tests, each with a path of its own."""
    inside = f"{HERE}{os.sep}"
    for item in items:
        if str(item.path).startswith(inside):
            item.add_marker(pytest.mark.device)
            item.add_marker(pytest.mark.skipif(not is_installed(), reason="torch_openreg is not installed"))


@pytest.fixture(autouse=True)
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Nothing that a test does in this process is a race."""
    yield
    assert races(capfd.readouterr().err) == []
