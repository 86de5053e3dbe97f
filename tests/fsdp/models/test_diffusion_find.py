"""Which family a folder belongs to: by its transformer, by id, or by a plugin's registration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mindspeed_mm.core.errors import ConfigError, ModelFolderError
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.flux.modeling_flux import FluxAdapter
from mindspeed_mm.fsdp.utils.register import Registry, model_register
from tests.helpers.tiny_generators import make_tiny_flux


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_flux(tmp_path / "model")


def with_transformer(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"transformer": ["diffusers", name]}))
    return folder


def test_a_family_is_found_by_its_transformer(folder: Path) -> None:
    assert type(find_adapter(folder)) is FluxAdapter
    assert type(find_adapter(folder, "flux")) is FluxAdapter


def test_an_unknown_transformer_is_named_with_those_known(folder: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"FluxTransformer3DModel.*Did you mean 'FluxTransformer2DModel'"):
        find_adapter(with_transformer(folder, "FluxTransformer3DModel"))


def test_a_plugins_family_is_found_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_register, "_entries", dict(model_register.loaded()))

    @model_register.register("ours")
    class Ours(FluxAdapter):
        transformer_class = "OurTransformer"

    assert type(find_adapter(with_transformer(folder, "OurTransformer"))) is Ours


def test_an_id_of_a_language_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'qwen3_vl' is not a generator"):
        find_adapter(folder, "qwen3_vl")


def test_a_scheduler_that_noise_levels_follow_from_is_not_guessed(folder: Path) -> None:
    shutil.rmtree(folder / "scheduler")
    with pytest.raises(ModelFolderError, match=r"'scheduler' is listed in .*, but its folder does not exist"):
        find_adapter(folder)


@pytest.mark.edge("G4")
def test_a_vae_that_sizes_follow_from_is_asked_for_by_those_who_use_it_and_may_be_noted(folder: Path) -> None:
    whole = find_adapter(folder)
    config = whole.component_config("vae")
    shutil.rmtree(folder / "vae")
    found = find_adapter(folder)
    with pytest.raises(ModelFolderError, match=r"'vae' is listed in .*, but its folder does not exist"):
        found.require("vae")
    found.note_components({"vae": config, "scheduler": {"shift": 99}})
    assert found.geometry == whole.geometry
    assert found.component_config("scheduler") == whole.component_config("scheduler")


def test_a_registry_tells_what_is_loaded() -> None:
    registry = Registry("model.model_id", builtin=lambda: {"later": "nowhere"})
    registry.register("now")(Path)
    assert registry.loaded() == {"now": Path} and "later" in registry.names()
