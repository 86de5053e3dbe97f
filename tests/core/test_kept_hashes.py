"""Hashes that are kept: a file is read once by one process, and again whenever it may have changed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindspeed_mm.core import kept_hashes
from mindspeed_mm.core.artifacts import sha256_file
from mindspeed_mm.core.kept_hashes import kept_sha256
from tests.helpers.distributed import run_ranks
from tests.helpers.logged import logged

CONTENT = b"some rows\n" * 50
SHA = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read, in turn; no file counts as fresh."""
    found: list[Path] = []
    monkeypatch.setattr(kept_hashes, "sha256_file", lambda path: found.append(path) or sha256_file(path))
    monkeypatch.setattr(kept_hashes, "_RACY_NS", -(10**12))
    monkeypatch.setattr(kept_hashes, "_here", {})
    return found


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(CONTENT)
    return path


def started_again() -> None:
    kept_hashes._here.clear()


def entry(cache: Path) -> Path:
    (path,) = cache.glob("file-hashes/*/*.json")
    return path


def test_a_second_start_reads_nothing(rows: Path, tmp_path: Path, read: list[Path]) -> None:
    for _ in range(3):
        assert kept_sha256(rows, tmp_path / "cache") == SHA
    started_again()
    assert kept_sha256(rows, str(tmp_path / "cache")) == SHA
    assert read == [rows]


def test_a_relative_path_is_the_file_of_the_working_directory(
    rows: Path, tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / rows.name).write_bytes(b"others")
    for folder, content in ((tmp_path, CONTENT), (tmp_path / "other", b"others"), (tmp_path, CONTENT)):
        monkeypatch.chdir(folder)
        assert kept_sha256(Path(rows.name), tmp_path / "cache") == hashlib.sha256(content).hexdigest()
    assert len(read) == 2


@pytest.mark.parametrize("field", ["st_size", "st_mtime_ns", "st_ctime_ns", "st_ino"])
@pytest.mark.parametrize("again", [started_again, lambda: None], ids=["another start", "same process"])
def test_a_file_of_which_anything_is_other_is_read_again(
    field: str, again: Callable[[], None], rows: Path, tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alone: a tool that gives a file its former time or size back does not hide the change."""
    status = rows.stat()
    told = {name: getattr(status, name) for name in ("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino")}
    kept_sha256(rows, tmp_path / "cache")
    again()
    real = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result | SimpleNamespace:
        return SimpleNamespace(**told | {field: told[field] + 1}) if path == rows else real(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    kept_sha256(rows, tmp_path / "cache")
    assert read == [rows, rows]


def test_another_file_of_the_same_size_and_time_is_read(rows: Path, tmp_path: Path, read: list[Path]) -> None:
    status = rows.stat()
    kept_sha256(rows, tmp_path / "cache")
    started_again()
    other = tmp_path / "new"
    other.write_bytes(CONTENT.upper())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(rows)
    assert kept_sha256(rows, tmp_path / "cache") == hashlib.sha256(CONTENT.upper()).hexdigest()


def test_a_file_that_has_just_changed_is_hashed_anew(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change in the same tick of the clock would not show."""
    for content in (CONTENT, CONTENT.upper()):
        status = rows.stat()
        rows.write_bytes(content)
        os.utime(rows, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert kept_sha256(rows, tmp_path / "cache") == hashlib.sha256(content).hexdigest()
    assert not (tmp_path / "cache").exists()
    now = time.time_ns
    monkeypatch.setattr(kept_hashes.time, "time_ns", lambda: now() + 1_900_000_000)
    kept_sha256(rows, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(kept_hashes.time, "time_ns", lambda: now() + 2_100_000_000)
    kept_sha256(rows, tmp_path / "cache")
    assert entry(tmp_path / "cache").is_file()


def test_what_changes_while_it_is_hashed_is_not_kept(
    rows: Path, tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(path: Path) -> str:
        found = sha256_file(path)
        path.write_bytes(b"other")
        return found

    monkeypatch.setattr(kept_hashes, "sha256_file", changing)
    kept_sha256(rows, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("file-hashes/*/*.json")) and not kept_hashes._here
    monkeypatch.setattr(kept_hashes, "sha256_file", sha256_file)
    assert kept_sha256(rows, tmp_path / "cache") == hashlib.sha256(b"other").hexdigest()


def flipped_digit(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace(SHA, ("1" if SHA[0] == "0" else "0") + SHA[1:]))


def of_another_file(path: Path) -> None:
    told = json.dumps({**json.loads(path.read_text().partition(" ")[2]), "path": "/another", "sha256": "0" * 64})
    path.write_text(f"{hashlib.sha256(told.encode()).hexdigest()[:16]} {told}")


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\0garbage"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        flipped_digit,
        of_another_file,
        Path.unlink,
    ],
)
def test_a_damaged_entry_is_made_again(
    damage: Callable[[Path], object], rows: Path, tmp_path: Path, read: list[Path]
) -> None:
    kept_sha256(rows, tmp_path)
    good = entry(tmp_path).read_bytes()
    damage(entry(tmp_path))
    for _ in range(2):
        started_again()
        assert kept_sha256(rows, tmp_path) == SHA
    assert read == [rows, rows]
    assert entry(tmp_path).read_bytes() == good


@pytest.mark.parametrize("home", ["a file", "no place", "no home"])
def test_where_nothing_can_be_kept_it_works_without(
    home: str, rows: Path, tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(kept_hashes, "user_cache", kept_hashes.user_cache.__wrapped__)  # type: ignore[attr-defined]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", {"a file": str(tmp_path / "file"), "no place": "/proc/none"}.get(home, ""))
    if home == "no home":
        monkeypatch.setattr(Path, "home", _no_home)
    with logged(logging.DEBUG) as records:
        for _ in range(2):
            started_again()
            assert kept_sha256(rows) == SHA
    assert read == [rows, rows]
    assert {record.levelname for record in records} <= {"DEBUG"}
    assert (home == "no home") == (not records)
    assert not recwarn.list and capfd.readouterr() == ("", "")


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_the_users_cache_is_where_the_desktop_says(
    rows: Path, tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_hashes, "user_cache", kept_hashes.user_cache.__wrapped__)  # type: ignore[attr-defined]
    monkeypatch.setenv("HOME", str(tmp_path))
    for named, place in ((str(tmp_path / "xdg"), "xdg"), ("", ".cache"), ("not/absolute", ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        started_again()
        kept_sha256(rows)
        assert entry(tmp_path / place / "mindspeed-mm").is_file()
    assert len(read) == 2


def hash_at_once(rows: str, cache: str, log: str) -> str:
    """What a rank does; the log takes a line for each time that the file is read."""

    def slow(path: Path) -> str:
        with Path(log).open("a") as file:
            file.write("read\n")
        time.sleep(0.2)
        return sha256_file(path)

    kept_hashes.sha256_file, kept_hashes._RACY_NS = slow, -(10**12)
    return kept_sha256(Path(rows), cache)


def test_one_rank_of_a_host_reads_and_the_others_wait(rows: Path, tmp_path: Path) -> None:
    found = run_ranks(4, hash_at_once, str(rows), str(tmp_path / "cache"), str(tmp_path / "log"))
    assert found == [SHA] * 4
    assert (tmp_path / "log").read_text() == "read\n"


def test_what_another_process_kept_a_moment_before_is_taken(
    rows: Path, tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came between the first look and the lock."""

    def kept_meanwhile(descriptor: int) -> bool:
        monkeypatch.undo()
        monkeypatch.setattr(kept_hashes, "_RACY_NS", -(10**12))
        assert kept_sha256(rows, tmp_path / "cache") == SHA  # by the real function, which notes no reading
        monkeypatch.setattr(kept_hashes, "sha256_file", lambda path: pytest.fail("the file is read again"))
        return True

    monkeypatch.setattr(kept_hashes, "_is_locked", kept_meanwhile)
    assert kept_sha256(rows, tmp_path / "cache") == SHA


def test_the_cache_does_not_grow_for_ever(tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_hashes, "_MOST_IN_A_FOLDER", 1)
    for number in range(300):
        (tmp_path / f"{number}").write_bytes(b"x")
        kept_sha256(tmp_path / f"{number}", tmp_path / "cache")
    kept = list((tmp_path / "cache").glob("file-hashes/*/*.json"))
    assert 100 < len(kept) <= 256
    assert not list((tmp_path / "cache").rglob("*.tmp"))
