"""Paths that do not exist, and run folders that cannot be written."""

from pathlib import Path

import pytest

from mindspeed_mm.core.errors import ConfigError, MachineError, ModelFolderError
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.path import check_paths, check_save_folder


def test_a_missing_model_folder_is_one_error_although_the_processor_follows_from_it(tmp_path: Path) -> None:
    (tmp_path / "model-7b").mkdir()
    missing = str(tmp_path / "model-8b")
    arguments = Arguments.model_validate(
        {
            "model": {"model_name_or_path": missing},
            "data": {"dataset_param": {"preprocess_parameters": {"model_name_or_path": missing}}},
        }
    )
    (error,) = check_paths(arguments)
    assert isinstance(error, ModelFolderError)
    assert "model-7b" in str(error)


def test_a_name_on_a_hub_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (error,) = check_paths(Arguments.model_validate({"model": {"model_name_or_path": "Qwen/Qwen3-VL-8B"}}))
    assert "local folder" in str(error)


def test_existing_paths_are_fine(tmp_path: Path) -> None:
    values = {"model": {"model_name_or_path": str(tmp_path)}, "training": {"save": str(tmp_path / "a" / "b")}}
    assert check_paths(Arguments.model_validate(values)) == []
    assert not (tmp_path / "a").exists()


def test_a_run_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("file", "file/run"):
        with pytest.raises(ConfigError, match="is a file"):
            check_save_folder(tmp_path / folder)


def test_a_run_folder_without_the_right_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The answer of the system is replaced: a test that runs as root may write everywhere.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(MachineError, match="cannot be written"):
        check_save_folder(tmp_path / "run")
