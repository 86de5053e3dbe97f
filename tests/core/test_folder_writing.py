"""The door through which folders are written: nothing that is not ours is replaced, and a kill at any moment leaves the
old folder or the new one, whole."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from mindspeed_mm.core import exchange
from mindspeed_mm.core.errors import ExitCode, MMError, UsageError
from mindspeed_mm.core.folder_kinds import MARKER
from mindspeed_mm.core.folder_writing import atomic_folder, remove_written
from mindspeed_mm.core.run_ownership import mark_run_folder
from tests.helpers.kills import everything, killed_before_each_change, nothing, without_exchange


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(target: Path, text: str, **options: object) -> None:
    """A folder with a file and a folder in it."""
    with atomic_folder(target, **options) as draft:  # type: ignore[arg-type]
        (draft / "sub").mkdir()
        (draft / "sub" / "a").write_text(text)
        (draft / "b").write_text(text)


def content(target: Path) -> dict[str, str]:
    return {name: data.decode() for name, data in everything(target).items() if not name.startswith(".")}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about a power failure: the disk need not be waited for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


OLD, NEW = {"sub/a": "old", "b": "old"}, {"sub/a": "new", "b": "new"}


@pytest.fixture(params=["exchange", "two renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How folders change places: as this system does it, and as on a file system that cannot."""
    if request.param == "two renames":
        monkeypatch.setattr(exchange, "exchange", lambda one, other: False)
    return str(request.param)


def test_folder_appears_when_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "export"
    with atomic_folder(target) as draft:
        (draft / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert names(target.parent) == ["export"]


def test_failed_folder_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError), atomic_folder(tmp_path / "export") as draft:
        (draft / "a").write_text("1")
        raise ValueError
    assert names(tmp_path) == []


@pytest.mark.edge("S1")
def test_only_what_came_through_the_door_is_replaced(way: str, tmp_path: Path) -> None:
    target = tmp_path / "export"
    write(target, "old")
    with pytest.raises(UsageError, match=r"the target exists.*--overwrite"):
        write(target, "new")
    with pytest.raises(ValueError), atomic_folder(target, overwrite=True):
        raise ValueError
    assert content(target) == OLD
    write(target, "new", overwrite=True)
    assert content(target) == NEW
    (target / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"1 file or folder that no mm command wrote there \(notes\.txt\)"):
        write(target, "newer", overwrite=True)
    assert content(target) == {**NEW, "notes.txt": "mine"}
    assert names(tmp_path) == ["export"]


@pytest.mark.edge("S1")
def test_what_somebody_puts_there_meanwhile_is_kept(way: str, tmp_path: Path) -> None:
    target = tmp_path / "export"
    write(target, "old")
    with (
        pytest.raises(UsageError, match="was added or changed in the meantime"),
        atomic_folder(target, overwrite=True) as draft,
    ):
        (draft / "b").write_text("new")
        (target / "sub" / "late").write_text("mine")
    assert content(target) == {**OLD, "sub/late": "mine"}
    assert names(tmp_path) == ["export"]
    with pytest.raises(UsageError, match="another process wrote it"), atomic_folder(tmp_path / "fresh"):
        write(tmp_path / "fresh", "old")
    assert content(tmp_path / "fresh") == OLD


def rewrite(path: Path, text: str) -> None:
    """Change a file as a user does: later than the clock of the file system is coarse."""
    time.sleep(0.02)
    path.write_text(text)


def linked(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


CHANGES: dict[str, Callable[[Path], None]] = {
    "longer": lambda path: rewrite(path, "changed"),
    "as long": lambda path: rewrite(path, "OLD"),
    "older": lambda path: os.utime(path, (1, 1)),
    "a link": linked,
}


@pytest.mark.edge("S1")
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_was_changed_since_is_kept(change: str, tmp_path: Path) -> None:
    target = tmp_path / "export"
    write(target, "old")
    CHANGES[change](target / "b")
    before = everything(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(UsageError, match=r"1 file that, by .*, changed after .* wrote there \(b\).*yourself"):
            write(target, "new", overwrite=overwrite)
    assert not remove_written(target)
    assert everything(tmp_path) == before
    (target / "b").unlink()
    write(target, "new", overwrite=True)
    assert content(target) == NEW


@pytest.mark.edge("S1")
def test_a_file_that_is_changed_meanwhile_is_kept(way: str, tmp_path: Path) -> None:
    target = tmp_path / "export"
    write(target, "old")
    with pytest.raises(UsageError, match="'b' was added or changed"), atomic_folder(target, overwrite=True):
        rewrite(target / "b", "OLD")
    assert content(target) == {**OLD, "b": "OLD"}
    assert names(tmp_path) == ["export"]


def test_a_copy_with_whole_seconds_is_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "export"
    write(target, "old")
    for name in OLD:
        second = (target / name).stat().st_mtime_ns // 10**9
        os.utime(target / name, (second, second))
    write(target, "new", overwrite=True)
    assert content(target) == NEW


@pytest.mark.edge("S1")
def test_a_marker_that_lists_names_alone_is_read(tmp_path: Path) -> None:
    target = tmp_path / "export"
    write(target, "old")
    marker = json.loads((target / MARKER).read_text())
    (target / MARKER).write_text(json.dumps({**marker, "entries": list(marker["entries"])}))
    os.utime(target / "b", (1, 1))  # a copy keeps no order of times but this one
    write(target, "new", overwrite=True)
    assert content(target) == NEW
    marker = json.loads((target / MARKER).read_text())
    (target / MARKER).write_text(json.dumps({**marker, "entries": list(marker["entries"])}))
    rewrite(target / "b", "OLD")
    with pytest.raises(UsageError, match=r"changed after .* \(b\)"):
        write(target, "newer", overwrite=True)
    assert content(target) == {**NEW, "b": "OLD"}


@pytest.mark.edge("S1", "S13")
@pytest.mark.parametrize("entries", [7, {"b": 7}, {"b": ["old", "new"]}, {"b": [3]}, [["b"]], {}])
def test_a_marker_of_another_kind_lists_nothing(entries: object, tmp_path: Path) -> None:
    target = tmp_path / "export"
    write(target, "old")
    (target / MARKER).write_text(json.dumps({"format": "mindspeed-mm-folder", "entries": entries}))
    with pytest.raises(UsageError, match=r"no mm command wrote|were changed"):
        write(target, "new", overwrite=True)
    assert content(target) == OLD


@pytest.mark.edge("S1")
def test_names_of_users_are_left_alone(way: str, tmp_path: Path) -> None:
    target = tmp_path / "X"
    mine = ("X.tmp", "X.former", ".X.tmp", ".mindspeed-mm-notes.draft", ".mindspeed-mm-notes.former")
    for name in mine:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("1")
    write(target, "old")
    write(target, "new", overwrite=True)
    assert [(tmp_path / name / "mine").read_text() for name in mine] == ["1"] * len(mine)


@pytest.mark.edge("S1")
def test_a_live_writers_draft_is_left_alone(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "one") as draft:
        (draft / "a").write_text("1")
        write(tmp_path / "two", "new")
        assert (draft / "a").exists()
    assert names(tmp_path) == ["one", "two"]


def places(tmp_path: Path) -> Iterator[tuple[str, Path, str]]:
    """Targets that are refused, and what is said."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    checkpoint = tmp_path / "run" / "iter_0000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "MANIFEST.json").write_text('{"format": "mindspeed-mm-checkpoint"}')
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    (tmp_path / "to-model").symlink_to(model)
    yield "the working directory", Path(), "is the working directory"
    yield "nothing", Path(), "is the working directory"
    yield "the root", Path("/"), "holds the input"
    yield "above", Path(".."), "holds the working directory"
    yield "a file", tmp_path / "file", "is a file"
    yield "below a file", tmp_path / "file" / "below", "is a file, not a folder"
    yield "a dangling link", tmp_path / "nowhere", "leads nowhere"
    yield "a loop", tmp_path / "loop", "cannot be a path|leads nowhere"
    yield "300 characters", tmp_path / ("x" * 300), r"x…  cannot be a path: File name too long"
    yield "NUL", tmp_path / "a\0b", r"a\\x00b  cannot be a path"
    yield "a mount point", Path("/proc"), "is a mount point|no mm command wrote"
    yield "a run", tmp_path / "run", "is a run folder"
    yield "in a run", tmp_path / "run" / "x", "lies in a run folder"
    yield "a checkpoint", checkpoint, "lies in a run folder|is a checkpoint"
    yield "in a checkpoint", checkpoint / "x", "lies in a checkpoint"
    yield "a model", model, "2 files or folders that no mm command wrote"
    yield "a link to a model", tmp_path / "to-model", "2 files or folders that no mm command wrote"
    yield "in a model", tmp_path / "to-model" / "x", "lies in a model folder"
    yield "a source", tmp_path / "source", "is the input"
    yield "above a source", tmp_path, "holds the input"
    yield "in a source", tmp_path / "source" / "x", "lies in the input"


@pytest.mark.edge("S1", "S13")
@pytest.mark.parametrize("overwrite", [False, True])
def test_places_that_are_refused(overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, here = tmp_path / "root", tmp_path / "elsewhere" / "here"
    root.mkdir()
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    source = root / "source"
    write(source, "source")
    cases = list(places(root))
    before = everything(tmp_path)
    for case, target, said in cases:
        with pytest.raises(MMError, match=said) as caught:
            write(target, "new", overwrite=overwrite, sources=[source])
        assert caught.value.exit_code in (ExitCode.USAGE, ExitCode.ENVIRONMENT), case
        assert everything(tmp_path) == before, case


def test_models_may_lie_in_a_runs_own_places(tmp_path: Path) -> None:
    mark_run_folder(tmp_path)
    write(tmp_path / "hf" / "iter_0000001", "new")
    write(tmp_path / "exported" / "x", "new")


def test_a_link_is_followed_and_kept(tmp_path: Path) -> None:
    write(tmp_path / "v1", "old")
    (tmp_path / "newest").symlink_to("v1")
    write(tmp_path / "newest", "new", overwrite=True)
    assert (tmp_path / "newest").is_symlink()
    assert content(tmp_path / "v1") == NEW


@pytest.mark.edge("S2")
def test_a_kill_at_any_change_leaves_the_old_folder_or_the_new_one(way: str, tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    target = parent / "export"

    def begin() -> None:
        write(target, "old")
        (parent / "X.tmp").write_text("mine")

    seen = set()
    before = nothing if way == "exchange" else without_exchange
    work = partial(write, target, "new", overwrite=True)
    for change in killed_before_each_change(parent, begin, work, small=True, before=before):
        if way == "exchange" or target.exists():
            assert content(target) in (OLD, NEW), change
            seen.add(content(target)["b"])
        write(parent / "next", "next")
        assert content(target) in (OLD, NEW), change
        write(target, "newest", overwrite=True)
        assert content(target)["b"] == "newest", change
        assert names(parent) == ["X.tmp", "export", "next"], change
    assert seen == {"old", "new"}


@pytest.mark.edge("S2")
def test_a_kill_while_the_first_one_is_written(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    target = parent / "export"
    for change in killed_before_each_change(parent, nothing, partial(write, target, "new"), small=True):
        assert not target.exists() or content(target) == NEW, change
        write(target, "new", overwrite=True)
        assert (content(target), names(parent)) == (NEW, ["export"]), change


@pytest.mark.edge("S13")
@pytest.mark.parametrize("name", ["a\0b", "/", "x" * 300, "\ud800", 7, None])
def test_a_folder_put_aside_whose_marker_is_damaged_is_left_alone(name: object, tmp_path: Path) -> None:
    former = tmp_path / ".mindspeed-mm-1.former"
    former.mkdir()
    (former / "a").write_text("mine")
    (former / MARKER).write_text(json.dumps({"format": "mindspeed-mm-folder", "name": name, "entries": []}))
    write(tmp_path / "export", "new")
    assert (former / "a").read_text() == "mine"


@pytest.mark.edge("S13")
def test_a_marker_that_is_nested_too_deeply_is_none_of_ours(tmp_path: Path) -> None:
    write(tmp_path / "export", "old")
    (tmp_path / "export" / MARKER).write_bytes(b'{"format": ' + b"[" * 100_000)
    with pytest.raises(UsageError, match="no mm command wrote"):
        write(tmp_path / "export", "new", overwrite=True)


def test_only_what_is_ours_and_untouched_is_removed(tmp_path: Path) -> None:
    write(tmp_path / "export", "old")
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "export")
    assert not remove_written(tmp_path / "mine")
    assert not remove_written(tmp_path / "link")
    (tmp_path / "export" / "mine").write_text("1")
    assert not remove_written(tmp_path / "export")
    (tmp_path / "export" / "mine").unlink()
    assert remove_written(tmp_path / "export")
    assert names(tmp_path) == ["link", "mine"]


@pytest.mark.edge("S6")
def test_folders_and_files_have_the_umasks_mode(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "export", "new")
    finally:
        os.umask(before)
    modes = {name: (tmp_path / "export" / name).stat().st_mode & 0o777 for name in ("", "sub", "b", MARKER)}
    assert modes == {"": 0o750, "sub": 0o750, "b": 0o640, MARKER: 0o640}
