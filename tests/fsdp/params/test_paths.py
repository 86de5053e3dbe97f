"""Paths of a YAML have one base, wherever it is started from."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.loader import ResolvedConfig, load_config

pytestmark = pytest.mark.edge("S8")

TEXT = """
model: {model_name_or_path: model}
training: {save: runs/mine}
data:
  dataset_param:
    basic_parameters: {dataset: 'rows.json, part-*.json, other.json', dataset_dir: media, cache_dir: cache}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A YAML with its inputs beside it, and a working directory elsewhere."""
    (tmp_path / "there" / "model").mkdir(parents=True)
    (tmp_path / "there" / "media").mkdir()
    for name in ("rows.json", "part-1.json"):
        (tmp_path / "there" / name).touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "there" / "run.yaml").write_text(TEXT)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "there"


def paths(config: ResolvedConfig) -> tuple[str | None, ...]:
    basic = config.arguments.data.dataset_param.basic_parameters
    arguments = config.arguments
    model, save = arguments.model.model_name_or_path, arguments.training.save
    return model, str(basic.dataset), basic.dataset_dir, basic.cache_dir, save


AS_WRITTEN = ("model", "rows.json, part-*.json, other.json", "media", "cache", "runs/mine")


def test_from_elsewhere_all_paths_start_beside_the_yaml_the_run_folder_too(place: Path) -> None:
    config = load_config(place / "run.yaml")
    rows = f"{place / 'rows.json'},{place / 'part-*.json'},other.json"
    media, cache, save = (str(place / name) for name in ("media", "cache", "runs/mine"))
    assert paths(config) == (str(place / "model"), rows, media, cache, save)
    assert config.origins["training.save"].kind == "derived"
    assert config.origins["training.save"].where.startswith("beside the YAML, ")


def test_from_its_folder_and_from_where_the_inputs_are_nothing_changes(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    assert paths(load_config(Path("run.yaml"))) == AS_WRITTEN
    (place / "configs").mkdir()
    (place / "run.yaml").rename(place / "configs" / "run.yaml")
    assert paths(load_config(Path("configs/run.yaml"))) == AS_WRITTEN


def test_inputs_that_are_in_both_places_follow_those_that_are_in_one(place: Path) -> None:
    (place.parent / "elsewhere" / "rows.json").touch()
    assert f"{place / 'rows.json'}," in str(paths(load_config(place / "run.yaml"))[1])


def test_two_bases_are_refused(place: Path) -> None:
    (place / "model").rename(place.parent / "elsewhere" / "model")
    with pytest.raises(
        ConfigError, match=r"'rows\.json' exists only beside the YAML .* 'model' of model\.model_name_or_path"
    ):
        load_config(place / "run.yaml")
    absolute = f"model: {{model_name_or_path: {place.parent / 'elsewhere' / 'model'}}}\n"
    (place / "run.yaml").write_text(TEXT.replace("model: {model_name_or_path: model}\n", absolute))
    assert paths(load_config(place / "run.yaml"))[-1] == str(place / "runs/mine")


def test_a_run_beside_the_yaml_is_gone_on_with_where_inputs_are_absolute(place: Path) -> None:
    (place / "run.yaml").write_text(
        f"model: {{model_name_or_path: {place / 'model'}}}\ntraining: {{save: runs/mine}}\n"
    )
    assert load_config(place / "run.yaml").arguments.training.save == "runs/mine"
    (place / "runs" / "mine").mkdir(parents=True)
    assert load_config(place / "run.yaml").arguments.training.save == str(place / "runs/mine")


def test_paths_on_the_command_line_start_at_the_working_directory(place: Path) -> None:
    config = load_config(place / "run.yaml", ["training.save=out", "model.model_name_or_path=model"])
    assert (config.arguments.training.save, config.arguments.model.model_name_or_path) == ("out", "model")
    assert config.arguments.data.dataset_param.basic_parameters.dataset_dir == str(place / "media")
