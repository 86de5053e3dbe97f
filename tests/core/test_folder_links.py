"""Conversion copies of a model's folder what training reads of it: nothing that leads out of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.folder_links import check_links
from tests.helpers.runs import mm
from tests.helpers.tiny_models import make_tiny_qwen3


def linked(name: str, target: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).symlink_to(target)


def template(target: str) -> Callable[[Path], Any]:
    def link(folder: Path) -> None:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/one.jinja").symlink_to(target)

    return link


def moved_out(folder: Path) -> None:
    shard = folder / "model.safetensors"
    shard.rename(folder.parent / "elsewhere.safetensors")
    shard.symlink_to("../elsewhere.safetensors")


def under_snapshots(folder: Path) -> None:
    """The name alone does not make a hub's cache of the folders around."""
    (folder.parent / "secret").write_text("secret")
    place = folder.parent / "snapshots"
    place.mkdir()
    folder.rename(place / "model")
    folder.symlink_to(place / "model")
    (place / "model/notes.txt").symlink_to("../../secret")


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "file": (linked("notes.txt", "/etc/passwd"), "notes.txt  links out of the folder, to /etc/passwd"),
    "dangling": (linked("notes.txt", "gone.txt"), "notes.txt  is a link that leads nowhere"),
    "circle": (linked("notes.txt", "notes.txt"), "notes.txt  is a link that leads in a circle"),
    "itself": (linked("notes.txt", "."), "notes.txt  is a link to a folder that it lies in"),
    "pipe": (lambda folder: os.mkfifo(folder / "notes.txt"), "notes.txt  is neither a file nor a folder"),
    "shard": (moved_out, "model.safetensors  links out of the folder"),
    "template": (template("/etc/passwd"), "one.jinja  links out of the folder, to /etc/passwd"),
    "templates": (template("."), "one.jinja  is a link to a folder that it lies in"),
    "snapshots": (under_snapshots, "notes.txt  links out of the folder"),
}


@pytest.fixture(scope="module")
def dcp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("links")
    model = make_tiny_qwen3(root / "model")
    assert mm("convert", model, root / "dcp", "--to", "dcp", "--no-verify").code == 0
    return root / "dcp"


@pytest.mark.parametrize("name", BAD)
def test_what_leads_out_is_refused_by_name_in_both_directions(name: str, dcp: Path, tmp_path: Path) -> None:
    change, words = BAD[name]
    model = make_tiny_qwen3(tmp_path / "model")
    change(model)
    for source, target, flags in ((model, "there", ("--to", "dcp")), (dcp, "back", ("--to", "hf", "--model", model))):
        if name.startswith("template") and source == model:
            continue  # templates are copied on the way back alone
        said = mm("convert", source, tmp_path / target, *flags, "--no-verify")
        assert said.code == 4, said.err
        assert words in said.err
        assert not (tmp_path / target).exists()


def test_the_hub_caches_links_are_followed_and_files_come_out(dcp: Path, tmp_path: Path) -> None:
    made = make_tiny_qwen3(tmp_path / "made")
    repository = tmp_path / "models--owner--name"
    snapshot, blobs = repository / "snapshots/abc123", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(made.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    assert mm("convert", snapshot, tmp_path / "there", "--to", "dcp", "--no-verify").code == 0
    assert mm("convert", dcp, tmp_path / "back", "--to", "hf", "--model", snapshot, "--no-verify").code == 0
    assert not [path for path in (tmp_path / "back").iterdir() if path.is_symlink()]
    assert load_file(tmp_path / "back/model.safetensors").keys() == load_file(snapshot / "model.safetensors").keys()
    (blobs / "0").unlink()
    with pytest.raises(ModelFolderError, match="is a link that leads nowhere"):
        check_links(snapshot)


def test_a_component_links_into_the_cache_of_its_generator(tmp_path: Path) -> None:
    component = tmp_path / "models--o--n/snapshots/abc/vae"
    component.mkdir(parents=True)
    (tmp_path / "models--o--n/blobs").mkdir()
    (tmp_path / "models--o--n/blobs/1").write_text("{}")
    (component / "config.json").symlink_to("../../../blobs/1")
    check_links(component)
    check_links(component.parent, deep=True)
