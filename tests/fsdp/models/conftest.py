"""Shared by the model tests: a folder of each kind, made once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_vl


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Read-only by convention."""
    root = tmp_path_factory.mktemp("models")
    return {
        "text": make_tiny_qwen3(root / "text"),
        "tied": make_tiny_qwen3(root / "tied", tie=True),
        "vision": make_tiny_qwen3_vl(root / "vision"),
    }


@pytest.fixture
def copied(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A private copy, for tests that damage it."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(folders[kind], tmp_path / kind))

    return copy
