"""The tiny model folder that the distributed tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tiny_models import make_tiny_qwen3_vl


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen3-VL of two vision blocks and two layers."""
    return make_tiny_qwen3_vl(tmp_path_factory.mktemp("models") / "qwen3_vl")
