"""Folders that take the place of others: after a kill or an error before any change, the next command finds the old
folder or the new one under its name, and the original of a conversion in place is never lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mindspeed_mm.core import exchange
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.folder_writing import atomic_folder, folder_in_place
from mindspeed_mm.core.healing import heal, heal_missing
from tests.helpers.kills import everything, killed_before_each_change, nothing, without_exchange

pytestmark = pytest.mark.edge("BS3")

OLD, NEW = {"sub/a": "old", "b": "old"}, {"sub/a": "new", "c": "new"}
MINE = ("w.former", "w.former.bak", ".mindspeed-mm-notes.former", ".w.draft")
"""Folders of a user, under names that a writer might choose."""


@pytest.fixture(params=["exchange", "two renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How folders change places: as this system does it, and as on a file system that cannot."""
    if request.param == "two renames":
        monkeypatch.setattr(exchange, "exchange", lambda one, other: False)
    return str(request.param)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about a power failure: the disk need not be waited for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def fill(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def content(folder: Path) -> dict[str, str]:
    return {name: data.decode() for name, data in everything(folder).items() if not name.startswith(".")}


def users_folder(target: Path) -> None:
    fill(target, OLD)


def folder_of_ours(target: Path) -> None:
    with atomic_folder(target) as draft:
        fill(draft, OLD)


BEGINNINGS: dict[str, Callable[[Path], None]] = {"a user's folder": users_folder, "a folder of ours": folder_of_ours}


def convert_in_place(target: Path, keep: bool) -> None:
    with folder_in_place(target, keep=keep) as draft:
        fill(draft, NEW)


@pytest.mark.parametrize(
    ("beginning", "keep", "raises"),
    [
        ("a user's folder", True, None),
        ("a folder of ours", False, None),
        ("a folder of ours", True, KeyboardInterrupt),
        pytest.param("a folder of ours", True, None, marks=pytest.mark.slow),
        pytest.param("a user's folder", False, None, marks=pytest.mark.slow),
        pytest.param("a user's folder", False, KeyboardInterrupt, marks=pytest.mark.slow),
    ],
)
def test_a_conversion_in_place_that_is_killed(
    way: str, beginning: str, keep: bool, raises: type[BaseException] | None, tmp_path: Path
) -> None:
    parent = tmp_path / "parent"
    target, backup = parent / "w", parent / "w.bak"

    def begin() -> None:
        BEGINNINGS[beginning](target)
        for name in MINE:
            fill(parent / name, {"mine": name})

    seen = []
    before = nothing if way == "exchange" else without_exchange
    work = partial(convert_in_place, target, keep)
    for change in killed_before_each_change(parent, begin, work, raises=raises, small=True, before=before):
        if way == "exchange" or raises is not None:
            assert content(target) in (OLD, NEW), change
            assert content(target) == OLD or not keep or content(backup) == OLD, change
        heal_missing(target)  # as every command does that reads the folder
        assert content(target) in (OLD, NEW), change
        heal(parent)
        is_new = content(target) == NEW
        seen.append(is_new)
        if keep:
            assert (content(backup) == OLD) if is_new else not backup.exists(), change
        left = {path.name for path in parent.iterdir()} - {"w", *MINE}
        assert left == ({"w.bak"} if is_new and keep else set()), change
        if not is_new:
            convert_in_place(target, keep)
            assert content(target) == NEW, change
        for name in MINE:
            assert content(parent / name) == {"mine": name}, change
    assert not seen[0] and (seen[-1] or keep or raises is not None)


def test_the_original_is_kept_under_a_name_that_must_be_free(way: str, tmp_path: Path) -> None:
    target = tmp_path / "w"
    fill(target, OLD)
    fill(tmp_path / "w.former", {"mine": "1"})
    convert_in_place(target, keep=True)
    assert (content(target), content(tmp_path / "w.bak")) == (NEW, OLD)
    (target / "mine").write_text("1")  # what somebody changed is not a conversion's result any more
    before = everything(tmp_path)
    with pytest.raises(UsageError, match=r"w\.bak  already exists, and the original is kept under this name"):
        convert_in_place(target, keep=True)
    assert everything(tmp_path) == before
    with pytest.raises(UsageError, match="already exists"), folder_in_place(tmp_path / "w.former") as draft:
        fill(draft, NEW)
        (tmp_path / "w.former.bak").mkdir()  # meanwhile
    assert content(tmp_path / "w.former") == {"mine": "1"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w", "w.bak", "w.former", "w.former.bak"]


def test_a_backup_of_the_users_does_not_take_the_place_of_a_folder_that_he_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "exchange", lambda one, other: False)
    parent = tmp_path / "parent"

    def begin() -> None:
        fill(parent / "w", OLD)

    work = partial(convert_in_place, parent / "w", keep=True)
    for change in killed_before_each_change(parent, begin, work, small=True, before=without_exchange):
        if (parent / "w").exists():
            (parent / "w").rename(tmp_path / f"elsewhere{change}")
            if not (parent / "w.bak").exists():
                fill(parent / "w.bak", {"mine": "1"})
                heal_missing(parent / "w")
                assert content(parent / "w.bak") == {"mine": "1"}, change
                assert not (parent / "w").exists(), change


def test_a_rename_that_is_refused_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "exchange", lambda one, other: False)
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if target == tmp_path / "w" and path.name.endswith(".draft"):
            raise PermissionError(1, "no", str(target))
        return rename(path, target)

    folder_of_ours(tmp_path / "w")
    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(PermissionError):
        convert_in_place(tmp_path / "w", keep=True)
    with pytest.raises(PermissionError), atomic_folder(tmp_path / "w", overwrite=True) as draft:
        fill(draft, NEW)
    assert content(tmp_path / "w") == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["w"]
