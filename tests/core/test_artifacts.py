"""Files that appear whole or not at all, and the run folder's lock."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from mindspeed_mm.core import artifacts
from mindspeed_mm.core.artifacts import LockOwner, RunFolder, append_jsonl, atomic_write_text
from mindspeed_mm.core.drafts import remove_dead_files
from mindspeed_mm.core.errors import ExitCode, MachineError
from tests.helpers.kills import killed_before_each_change


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_replaces_the_whole_file(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    atomic_write_text(target, "a much longer first content")
    atomic_write_text(target, "ü")
    assert target.read_text(encoding="utf-8") == "ü"
    assert names(tmp_path) == ["run.json"]


def test_failed_write_keeps_the_old_content_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "run.json"
    atomic_write_text(target, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifacts.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        atomic_write_text(target, "new")
    assert target.read_text() == "old"
    assert names(tmp_path) == ["run.json"]


def test_write_reaches_the_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(artifacts.os, "fsync", lambda descriptor: calls.append("fsync"))
    rename = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: (calls.append("rename"), rename(self, target))[1])
    atomic_write_text(tmp_path / "tracker", "7")
    assert calls == ["fsync", "rename", "fsync"]


@pytest.mark.edge("BS14")
def test_what_a_kill_leaves_is_removed_by_the_next_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    users = (".resolved.yaml.123.tmp", ".mindspeed-mm-mine.tmp", "notes.tmp")

    def begin() -> None:
        run.resolved.write_text("old")
        for name in users:
            (run.path / name).write_text("mine")

    left = set()
    work = partial(atomic_write_text, run.resolved, "new")
    for change in killed_before_each_change(run.path, begin, work, small=True):
        assert run.resolved.read_text() in ("old", "new"), change
        left |= {*names(run.path)} - {*users, "resolved.yaml"}
        run.prepare()
        assert names(run.path) == sorted([*users, "resolved.yaml"]), change
    assert left and all(name.startswith(".mindspeed-mm-") for name in left)


@pytest.mark.edge("BS14")
def test_what_others_write_now_stays(tmp_path: Path) -> None:
    """A live process here; and one of another machine, whose lock may not be seen here."""
    elsewhere = tmp_path / f".mindspeed-mm-{'0' * 32}.tmp"
    elsewhere.write_text("half")
    with artifacts.atomic_file(tmp_path / "a") as draft:
        draft.write_text("half")
        read, write = os.pipe()
        if not os.fork():
            os.write(write, json.dumps(remove_dead_files(tmp_path)).encode())
            os._exit(0)
        assert json.loads(os.read(read, 1000)) == []
    assert names(tmp_path) == [elsewhere.name, "a"]
    os.utime(elsewhere, (1, 1))
    assert remove_dead_files(tmp_path) == [elsewhere.name]


def test_sha256(tmp_path: Path) -> None:
    content = os.urandom(5_000_000)
    (tmp_path / "a").write_bytes(content)
    assert artifacts.sha256_file(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_jsonl_repairs_a_cut_line_and_holds_only_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste')
    append_jsonl(path, {"step": 2, "loss": math.nan, "parts": [math.inf, 1.5]})
    append_jsonl(path, {"step": 3})
    lines = path.read_text().splitlines()
    assert lines[1] == '{"ste'
    assert [json.loads(line) for line in lines[2:]] == [{"step": 2, "loss": None, "parts": [None, 1.5]}, {"step": 3}]


def test_free_bytes_of_a_folder_to_come(tmp_path: Path) -> None:
    assert artifacts.free_bytes(tmp_path / "a" / "b") > 0


def test_disk_full_is_told_from_other_errors() -> None:
    assert artifacts.is_disk_full(OSError(errno.ENOSPC, ""))
    assert not artifacts.is_disk_full(OSError(errno.EACCES, ""))
    assert not artifacts.is_disk_full(ValueError())


@pytest.mark.parametrize("path", ["/proc/mindspeed-mm-run", "{tmp}/file", "{tmp}/file/below"])
def test_folder_that_cannot_be_written(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    target = path.format(tmp=tmp_path)
    with pytest.raises(MachineError, match=r"cannot be written|is a file") as caught:
        RunFolder(target).prepare()
    assert target in str(caught.value)
    assert caught.value.exit_code is ExitCode.ENVIRONMENT


def leave_lock(folder: RunFolder, owner: LockOwner, silent_for_s: float = 0.0) -> None:
    folder.prepare()
    folder.lock_file.write_text(json.dumps(asdict(owner)))
    written = folder.lock_file.stat().st_mtime - silent_for_s
    os.utime(folder.lock_file, (written, written))


def test_second_job_is_refused_and_the_first_lets_go(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.lock("first"):
        with pytest.raises(MachineError, match=rf"in use by run first .*pid {os.getpid()}"), folder.lock("second"):
            pass
        assert folder.lock_file.exists()
    with folder.lock("third"):
        pass
    assert names(folder.path) == []


def test_job_of_another_process(tmp_path: Path) -> None:
    script = (
        "import sys; from mindspeed_mm.core.artifacts import RunFolder\n"
        "with RunFolder(sys.argv[1]).lock('other'):\n    print('held', flush=True); sys.stdin.read()"
    )
    folder = RunFolder(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(MachineError, match="in use by run other"), folder.lock("mine"):
            pass
        other.kill()
        other.wait()
        assert folder.lock_file.exists()  # killed: it could not let go
        with folder.lock("mine"):
            pass


@pytest.mark.parametrize("change", [{"pid": 2**22 + 1, "started": "1"}, {"started": "1"}])
def test_lock_of_a_dead_process_on_this_host_is_stale(change: dict[str, object], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    leave_lock(folder, replace(LockOwner.this_process("dead"), **change))
    with folder.lock("mine"):
        assert json.loads(folder.lock_file.read_text())["run_id"] == "mine"


@pytest.mark.edge("S5")
@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"boot": "another"}, {"pid_namespace": "pid:[1]"}])
def test_job_whose_process_cannot_be_seen_lives_as_long_as_it_beats(change: dict[str, str], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    elsewhere = replace(LockOwner.this_process("far"), started="1", **change)
    leave_lock(folder, elsewhere, silent_for_s=100)
    with pytest.raises(MachineError, match=r"in use by run far .*seen 100 s ago"), folder.lock("mine"):
        pass
    leave_lock(folder, elsewhere, silent_for_s=200)
    with folder.lock("mine"):
        pass


@pytest.mark.edge("S5")
@pytest.mark.parametrize("proc", [["--mount-proc"], []])
def test_a_container_under_the_same_host_name_does_not_take_the_lock(proc: list[str], tmp_path: Path) -> None:
    container = ["unshare", "--pid", "--fork", *proc]
    if not shutil.which("unshare") or subprocess.run([*container, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespaces here")
    script = (
        "import sys; from mindspeed_mm.core.artifacts import RunFolder\n"
        "with RunFolder(sys.argv[1]).lock('other'):\n    print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as outside:
        assert outside.stdout is not None
        outside.stdout.readline()
        inside = subprocess.run([*container, *command], input=b"", capture_output=True)
        assert inside.returncode and b"in use by run other" in inside.stderr
        outside.communicate()
    with subprocess.Popen([*container, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as inside_first:
        assert inside_first.stdout is not None
        inside_first.stdout.readline()
        with pytest.raises(MachineError, match="in use by run other"), RunFolder(tmp_path).lock("mine"):
            pass
        inside_first.communicate()


@pytest.mark.edge("S5")
def test_lock_of_an_older_version_lives_as_long_as_it_beats(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    leave_lock(folder, LockOwner.this_process("old"))
    owner = json.loads(folder.lock_file.read_text())
    del owner["pid_namespace"]
    folder.lock_file.write_text(json.dumps(owner))
    with pytest.raises(MachineError, match="in use by run old"), folder.lock("mine"):
        pass


@pytest.mark.edge("S13")
def test_a_folder_in_place_of_the_lock_file_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.lock_file.mkdir()
    with pytest.raises(MachineError, match=rf"{folder.lock_file}.*is a folder"), folder.lock("mine"):
        pass


@pytest.mark.edge("S7")
@pytest.mark.parametrize("content", [b"mine", b"\xff\xfe", b"[" * 100_000, b'{"mine": 1}'])
def test_a_users_file_in_place_of_the_lock_file_is_kept(content: bytes, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.lock_file.write_bytes(content)
    with pytest.raises(MachineError, match=rf"{folder.lock_file}.*no run has written it.*Move it"), folder.lock("mine"):
        pass
    assert folder.lock_file.read_bytes() == content


def test_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "_HEARTBEAT_S", 0.01)
    folder = RunFolder(tmp_path)
    with folder.lock("mine"):
        os.utime(folder.lock_file, (1, 1))
        for _ in range(500):
            if folder.lock_file.stat().st_mtime > 1:
                break
            artifacts.threading.Event().wait(0.01)
        assert folder.lock_file.stat().st_mtime > 1


@pytest.mark.parametrize("content", [b'{"host"', b"", b"\0\0", b'{"host": ' + b"[" * 100_000])
def test_unreadable_lock_is_stale(content: bytes, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.lock_file.write_bytes(content)
    with folder.lock("mine"):
        pass
