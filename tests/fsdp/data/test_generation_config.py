"""The configuration of generation data: its own keys, paths beside the YAML, what is built and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.params.rules.all import check_cross_section
from mindspeed_mm.fsdp.params.rules.unbuilt import unbuilt_features

YAML = """
model: {model_name_or_path: model}
data:
  dataset_param:
    dataset_type: generation
    basic_parameters: {dataset: rows.jsonl, dataset_dir: media, data_folder: clips, features_dir: features}
    preprocess_parameters: {buckets: [480x832x81, 512x512], fps: 16}
"""


def arguments(dataset_type: str = "generation", loader: Any = None, **basic: Any) -> Arguments:
    dataset = {"dataset_type": dataset_type, "basic_parameters": basic}
    data = {"dataset_param": dataset, "dataloader_param": loader or {}}
    return Arguments.model_validate({"data": data, "training": {"val_interval": 5}})


def test_keys_of_the_card_are_known_and_paths_are_found_beside_the_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model", "media", "clips", "features"):
        (tmp_path / "there" / name).mkdir(parents=True)
    path = tmp_path / "there" / "run.yaml"
    path.write_text(YAML)
    monkeypatch.chdir(tmp_path)
    param = load_config(Path("there/run.yaml")).arguments.data.dataset_param
    basic, preprocess = param.basic_parameters, param.preprocess_parameters
    assert (basic.features_dir, basic.data_folder) == ("there/features", "there/clips")
    assert (basic.dataset_dir, preprocess.model_name_or_path) == ("there/media", "there/model")
    assert (preprocess.buckets, preprocess.fps, preprocess.frame_interval) == (["480x832x81", "512x512"], 16, None)
    # On the command line paths are relative to the working directory.
    key = "data.dataset_param.basic_parameters.features_dir"
    assert load_config(path, [f"{key}=new"]).arguments.data.dataset_param.basic_parameters.features_dir == "new"
    with pytest.raises(ConfigError, match="Did you mean 'clip_position'"):
        load_config(path, ["data.dataset_param.preprocess_parameters.clip_positon=middle"])


@pytest.mark.parametrize(
    ("basic", "count"),
    [({}, 1), ({"val_rate": 0.1}, 0), ({"val_dataset": "rows"}, 0), ({"val_features_dir": "features"}, 0)],
)
def test_validation_needs_rows(basic: dict[str, Any], count: int) -> None:
    found = [p.key for p in check_cross_section(arguments(**basic))]
    assert found == ["training.val_interval"] * count
    assert not check_cross_section(arguments("plugin"))
    both = check_cross_section(arguments(val_features_dir="features", val_rate=0.1))
    assert [p.key for p in both] == ["data.dataset_param.basic_parameters.val_dataset"]


def test_what_is_built() -> None:
    mode = {"dataloader_mode": "variable"}
    assert unbuilt_features(arguments(loader=mode)) == []
    key = "data.dataloader_param.dataloader_mode"
    assert unbuilt_features(arguments("huggingface", loader=mode)) == []
    assert [p.key for p in unbuilt_features(arguments(loader={"dataloader_mode": "custom"}))] == [key]
    streaming = "data.dataset_param.basic_parameters.streaming"
    assert [p.key for p in unbuilt_features(arguments(streaming=True))] == [streaming]
    assert unbuilt_features(arguments("plugin", streaming=True)) == []
