"""What names a cached sample: whatever shapes it, a change of it gives another name."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem, RowLocation, Sample
from mindspeed_mm.fsdp.data.sample_cache.identity import SampleKeys, digest_of, settings_of
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DatasetParam
from mindspeed_mm.fsdp.utils import plugins


def archive(path: Path, *contents: bytes) -> None:
    with tarfile.open(path, "w") as shard:
        for number, content in enumerate(contents):
            member = path.with_name(f"{number}.png")
            member.write_bytes(content)
            shard.add(member, member.name)


def key_of(source: str, folder: Path) -> bytes:
    sample = Sample(RowLocation("rows.jsonl", 0), media=[MediaItem("image", source)])
    return SampleKeys(BasicParameters(dataset_dir=str(folder))).key(sample)


def test_an_archive_that_changed_holds_other_pictures(tmp_path: Path) -> None:
    keys = []
    for contents in ([b"a"], [b"b", b"c"]):
        archive(tmp_path / "x.tar", *contents)
        keys.append(key_of("x.tar/0.png", tmp_path))
    assert keys[0] != keys[1] == key_of("x.tar/0.png", tmp_path)


def test_a_picture_that_is_found_from_the_working_directory_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Media are looked up in `dataset_dir`, or else here."""
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    keys = []
    for content in (b"a", b"bc"):
        (tmp_path / "data" / "a.png").write_bytes(content)
        keys.append(key_of("data/a.png", tmp_path / "data"))
    assert keys[0] != keys[1]


@pytest.mark.parametrize("plugin", ["own_rows", "own_rows/kind.py"])
def test_all_modules_of_a_plugin_shape_its_samples(
    plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only the one that holds the class: it may call any of the others."""
    folder = tmp_path / "own_rows"
    folder.mkdir()
    (folder / "kind.py").write_text("from own_rows.helper import ASKED\n\n\nclass Kind:\n    asked = ASKED\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_OUTSIDE", set())
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    codes = []
    for asked in ("What?", "Which?"):
        (folder / "helper.py").write_text(f"ASKED = {asked!r}\n")
        try:
            plugins.import_plugin([plugin])
            codes.append(settings_of(DatasetParam(), None, sys.modules["own_rows.kind"].Kind())["code"])
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "own_rows"]:
                del sys.modules[name]
    assert codes[0] != codes[1]


def test_keys_of_a_plugin_shape_its_samples() -> None:
    """Of its own `__getitem__`, which the row does not tell of."""

    def name(**own_keys: Any) -> str:
        return digest_of(settings_of(DatasetParam.model_validate({"dataset_type": "marks", **own_keys})))

    assert len({name(), name(scale=100), name(scale=1000)}) == 3
