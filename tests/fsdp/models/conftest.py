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


@pytest.fixture(scope="session")
def generators(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of generators, read-only by convention."""
    from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan  # imports diffusers

    root = tmp_path_factory.mktemp("generators")
    return {
        "flux": make_tiny_flux(root / "flux"),
        "flux_guidance": make_tiny_flux(root / "flux_guidance", guidance_embeds=True),
        "flux_pixels": make_tiny_flux(root / "flux_pixels", identity_vae=True),
        "t2v": make_tiny_wan(root / "t2v"),
        "t2v_pixels": make_tiny_wan(root / "t2v_pixels", identity_vae=True),
        "i2v": make_tiny_wan(root / "i2v", task="i2v"),
        "i2v_pixels": make_tiny_wan(root / "i2v_pixels", task="i2v", identity_vae=True),
    }


@pytest.fixture
def copied(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A private copy, for tests that damage it."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(folders[kind], tmp_path / kind))

    return copy


@pytest.fixture
def copied_generator(generators: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A private copy of a generator's folder."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(generators[kind], tmp_path / kind))

    return copy
