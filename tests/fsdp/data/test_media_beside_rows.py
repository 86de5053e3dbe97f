"""Media that lie beside the file of their rows, with and without `dataset_dir`."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from tests.fsdp.data.conftest import conversation, picture, write_jsonl

pytestmark = pytest.mark.edge("R16")


def data_set(model: Path, *files: Path, **basic: Any) -> Any:
    param = {
        "basic_parameters": {"dataset": [str(file) for file in files], **basic},
        "preprocess_parameters": {"model_name_or_path": str(model)},
    }
    return build_mm_dataset(DatasetParam.model_validate(param))[0]


def rows_beside(folder: Path, width: int, source: Any) -> Path:
    folder.mkdir()
    picture(width, 32).save(folder / "a.png")
    return write_jsonl(folder / "rows.jsonl", [conversation(images=[source])])


def grid_width(sample: Any) -> int:
    return int(sample["media"][0].tensors["grid_thw"][2])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("source", ["a.png", {"path": "a.png"}])
def test_each_file_finds_the_pictures_beside_it(vlm_folder: Path, tmp_path: Path, streams: bool, source: Any) -> None:
    files = [rows_beside(tmp_path / f"set{width}", width, source) for width in (32, 64)]
    dataset = data_set(vlm_folder, *files, streaming=streams)
    assert grid_width(dataset[1]) == 2 * grid_width(dataset[0])
    assert dataset.measure(1).patches == 2 * dataset.measure(0).patches


def test_an_absolute_path_beside_the_rows_is_inside_the_media_roots(vlm_folder: Path, tmp_path: Path) -> None:
    dataset = data_set(vlm_folder, rows_beside(tmp_path / "set", 32, str(tmp_path / "set" / "a.png")))
    assert dataset[0]["media"]


def test_a_given_dataset_dir_is_the_only_place(vlm_folder: Path, tmp_path: Path) -> None:
    file = rows_beside(tmp_path / "set", 32, "a.png")
    with pytest.raises(DataError, match="not found"):
        data_set(vlm_folder, file, dataset_dir=str(tmp_path))[0]


@pytest.mark.parametrize("linked", [False, True])
def test_paths_from_the_working_directory(
    vlm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    """`./data/train/a.png` with `dataset_dir: ./data`: how MindSpeed-MM's own converters write rows."""
    model = vlm_folder.resolve()
    data = tmp_path / "disk" if linked else tmp_path / "data"
    (data / "train").mkdir(parents=True)
    if linked:
        (tmp_path / "data").symlink_to(data)
    picture(64, 32).save(data / "train" / "a.png")
    picture(32, 32).save(tmp_path / "secret.png")
    monkeypatch.chdir(tmp_path)
    file = write_jsonl(tmp_path / "rows.jsonl", [conversation(images=["./data/train/a.png"])])
    assert grid_width(data_set(model, file, dataset_dir="./data")[0]) == 8
    for outside in ("secret.png", "./data/train/b.png"):
        file = write_jsonl(tmp_path / "rows.jsonl", [conversation(images=[outside])])
        with pytest.raises(DataError, match=r"not found\. Relative paths start at dataset_dir"):
            data_set(model, file, dataset_dir="./data")[0]


@pytest.mark.edge("BR13")
@pytest.mark.parametrize("source", ["a.png", "images/a.png"])
def test_a_folder_called_data_that_is_not_named_decides_nothing(
    vlm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    model = vlm_folder.resolve()
    file = rows_beside(tmp_path / "set", 32, source)
    for folder, width in ((tmp_path / "set" / "images", 64), (tmp_path / "data", 96), (tmp_path / "data/images", 96)):
        folder.mkdir(exist_ok=True)
        picture(width, 32).save(folder / "a.png")
    monkeypatch.chdir(tmp_path)
    assert grid_width(data_set(model, file)[0]) == (4 if source == "a.png" else 8)
    (file.parent / source).unlink()
    with pytest.raises(DataError, match=f"set/{source}' not found"):
        data_set(model, file)[0]
    assert grid_width(data_set(model, file, dataset_dir="data")[0]) == 12


def test_media_outside_both_stay_refused(vlm_folder: Path, tmp_path: Path) -> None:
    picture(32, 32).save(tmp_path / "secret.png")
    file = rows_beside(tmp_path / "set", 32, "../secret.png")
    with pytest.raises(DataError, match="outside the media roots"):
        data_set(vlm_folder, file)[0]


def test_a_file_named_without_its_folder_finds_them_too(
    vlm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rows_beside(tmp_path / "set", 64, "a.png").parent)
    assert grid_width(data_set(vlm_folder.resolve(), Path("rows.jsonl"))[0]) == 8


@pytest.mark.parametrize("basic", [{}, {"dataset_dir": "./data"}])
def test_an_archive_may_lie_in_the_working_directory(
    vlm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, basic: dict[str, str]
) -> None:
    """As pictures may that lie in none."""
    model = vlm_folder.resolve()
    (tmp_path / "data" / "rows").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with tarfile.open("data/x.tar", "w") as shard:
        picture(64, 32).save("a.png")
        shard.add("a.png")
    file = write_jsonl(tmp_path / "data" / "rows" / "rows.jsonl", [conversation(images=["data/x.tar/a.png"])])
    assert grid_width(data_set(model, file, media_roots=[str(tmp_path)], **basic)[0]) == 8
