"""Files that a run leaves behind: written whole or not at all, in a run folder that one job at a time may own."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_mm.core.drafts import boot_id, draft_file, remove_dead_files
from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.core.json_file import JsonObject, parse_json

SAMPLES_MANIFEST = "samples.jsonl"
"""Beside what a run drew while it was trained."""
DRAWN_MANIFEST = "manifest.jsonl"
"""Beside what `mm infer` drew."""
_CHUNK_BYTES = 4 << 20
_HEARTBEAT_S = 30.0
_SILENT_AFTER_S = 180.0


def fsync_path(path: Path) -> None:
    """Force a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Replace a file: whoever reads it, after a crash too, sees the old content or the new one.

    Yields:
        An empty file beside it to write into. It takes the name once it is on the disk, and is removed when the body
        raises.
    """
    with draft_file(path.parent) as draft:
        yield draft
        fsync_path(draft)
        draft.replace(path)
    fsync_path(path.parent)


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Replace a file by `content`, as `atomic_file`."""
    with atomic_file(path) as draft:
        draft.write_bytes(content)


def atomic_write_text(path: Path, text: str) -> None:
    """Replace a file by `text`, encoded as UTF-8, as `atomic_write_bytes` does."""
    atomic_write_bytes(path, text.encode())


def atomic_write_jsonl(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    """`atomic_write_text` of one JSON object a line."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    atomic_write_text(path, "".join(lines))


def fsync_tree(folder: Path) -> None:
    """Force every file and folder below `folder` to the disk, and `folder` itself."""
    for path in folder.rglob("*"):
        fsync_path(path)
    fsync_path(folder)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def append_jsonl(path: Path, *records: Mapping[str, object]) -> None:
    """Append JSON objects, each as one line. Numbers that JSON lacks (NaN, infinities) become null.

    A line that a crash has cut short stays on its own line; readers skip what does not parse.
    """
    lines = "".join(json.dumps(_finite(each), ensure_ascii=False, allow_nan=False) + "\n" for each in records)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            lines = "\n" + lines
        rest = memoryview(lines.encode())
        while rest:  # a full disk takes a part, and refuses the rest
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


def _finite(value: object) -> object:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def read_jsonl(path: Path) -> list[JsonObject]:
    """The objects of a JSONL file that is written while a run goes on; a line that a crash cut short is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):  # text may hold U+2028 and its like
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def free_bytes(path: Path) -> int:
    """Bytes free on the file system that holds `path`, or would hold it."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def make_writable_folder(path: Path) -> None:
    """Make the folder, and prove that a file can be written there.

    Raises:
        MachineError: The path is a file, or nothing can be written below it.
    """
    if path.exists() and not path.is_dir():
        raise MachineError("is a file, not a folder", where=str(path), way_out="Name a folder to write to.")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path, prefix=".probe-"):  # without a name, where the file system can do that
            pass
    except OSError as error:
        raise MachineError(
            f"cannot be written: {error.strerror or error}",
            where=str(path),
            way_out="Check its permissions and the disk, or choose another folder.",
        ) from error


def is_disk_full(error: BaseException) -> bool:
    """Whether an error says that a file system, a quota or a file-size limit is used up."""
    return isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class LockOwner:
    """Who holds a run folder."""

    host: str
    boot: str
    """Identity of the host's current boot: a lock from before a reboot is stale."""
    pid: int
    started: str
    """Start time of the process in the kernel's clock ticks: tells a reused pid apart."""
    run_id: str
    pid_namespace: str = ""
    """What the pid counts in: containers of one host number their processes anew, perhaps under one host name."""

    @classmethod
    def this_process(cls, run_id: str) -> LockOwner:
        """Describe the calling process as the owner of a run folder, under `run_id`."""
        pid = os.getpid()
        return cls(socket.gethostname(), boot_id(), pid, _start_ticks(pid), run_id, _pid_namespace())

    def is_gone(self, silent_for_s: float) -> bool:
        """Whether the owner is dead: seen directly among the processes of this host, by its heartbeat elsewhere. A
        host of the same name that was booted at another time is elsewhere too: it may be another machine."""
        here = LockOwner.this_process("")
        places = ((owner.host, owner.boot, owner.pid_namespace) for owner in (self, here))
        if len(set(places)) > 1:
            return silent_for_s > _SILENT_AFTER_S
        return self.started != _start_ticks(self.pid)


def _is_lock(content: bytes) -> bool:
    """Whether a lock file is a job's, also one that a crash has cut short: others are not overwritten."""
    return content.startswith(b'{"host"') or not content.strip(b"\0")


def _pid_namespace() -> str:
    """Identity of this process's PID namespace, when /proc shows its processes; else an identity of its own, which no
    other process shares."""
    try:
        shows_us = Path("/proc/self").readlink().name == str(os.getpid())
        if shows_us:
            return Path("/proc/self/ns/pid").readlink().name
        return f"unseen-{uuid.uuid4()}"
    except OSError:
        return ""


def _start_ticks(pid: int) -> str:
    """Field 22 of /proc/PID/stat; empty when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    if state == "Z":
        return ""
    return fields[18]


def process_age_s() -> float:
    """Seconds since this process was started; infinite where the system does not tell."""
    ticks = _start_ticks(os.getpid())
    if not ticks:
        return math.inf
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


class RunFolder:
    """The paths of a run, and the lock that keeps a second job out.

    Args:
        path: `training.save`.
        key: Where the path was configured, for messages.
    """

    def __init__(self, path: str | Path, key: str = "training.save") -> None:
        self.path, self._key = Path(path), key
        self.config = self.path / "config.yaml"
        self.resolved = self.path / "resolved.yaml"
        self.run_json = self.path / "run.json"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.tensorboard = self.path / "tb"
        self.log = self.path / "log"
        self.evaluation = self.path / "eval"
        self.samples = self.path / "samples"
        self.best = self.path / "best.json"
        self.report = self.path / "report.html"
        self.lock_file = self.path / ".lock"

    def sample_manifests(self) -> list[Path]:
        """`samples/iter_*/samples.jsonl`: what a generator made while it was trained, by step."""
        return sorted(self.samples.glob(f"iter_*/{SAMPLES_MANIFEST}"))

    def prepare(self) -> None:
        """Make the folder; `MachineError` when it is a file or cannot be written. Half-written files that a killed job
        left in it are removed."""
        make_writable_folder(self.path)
        with suppress(OSError):
            remove_dead_files(self.path)

    @contextmanager
    def lock(self, run_id: str) -> Iterator[None]:
        """Hold the folder while the body runs. The lock of a dead job is taken over.

        Raises:
            MachineError: Another job that lives, here or on another host, holds it.
        """
        self.prepare()
        owner = LockOwner.this_process(run_id)
        with one_at_a_time(self.path):
            self._refuse_second_job()
            atomic_write_text(self.lock_file, json.dumps(asdict(owner)))
        stop = threading.Event()
        heartbeat = threading.Thread(target=self._beat, args=(stop,), name="run-folder-lock", daemon=True)
        heartbeat.start()
        try:
            yield
        finally:
            stop.set()
            heartbeat.join()
            if self._owner() == owner:
                self.lock_file.unlink(missing_ok=True)

    def is_held(self) -> bool:
        """Whether a job that lives holds the folder. Nothing is written, unlike where a lock is taken: the silence of a
        job on another host is measured by this host's clock."""
        owner = self._owner()
        if owner is None:
            return False
        try:
            silent_for_s = time.time() - self.lock_file.stat().st_mtime
        except OSError:
            return False
        return not owner.is_gone(max(0.0, silent_for_s))

    def check_lock_file(self) -> None:
        """Raise `MachineError` when something stands in the lock file's place that no job of ours has written."""
        if self.lock_file.is_dir():
            raise MachineError(
                "is a folder, but a run keeps its lock file there", where=str(self.lock_file), key=self._key
            )
        if self.lock_file.is_symlink() or (self.lock_file.is_file() and not _is_lock(self.lock_file.read_bytes())):
            raise MachineError(
                "is where a run keeps its lock file, but no run has written it",
                where=str(self.lock_file),
                key=self._key,
                way_out="Move it elsewhere, or name another folder.",
            )

    def _refuse_second_job(self) -> None:
        self.check_lock_file()
        owner = self._owner()
        if owner is None:
            return
        # By the clock of the file system: hosts' clocks may differ.
        probe = self.path / f".clock-{os.getpid()}"
        probe.write_bytes(b"")
        now = probe.stat().st_mtime
        probe.unlink()
        silent_for_s = max(0.0, now - self.lock_file.stat().st_mtime)
        if owner.is_gone(silent_for_s):
            return
        raise MachineError(
            f"is in use by run {owner.run_id} (host {owner.host}, pid {owner.pid}, seen {silent_for_s:.0f} s ago)",
            where=str(self.path),
            key=self._key,
            way_out="Wait for it to end, or give this run a different folder. The lock of a dead job on another host "
            f"expires after {_SILENT_AFTER_S:.0f} s; if you are sure that it is dead, delete {self.lock_file}.",
        )

    def _owner(self) -> LockOwner | None:
        """Who is named in the lock file; None when there is none, or one that a crash has cut short."""
        try:
            return LockOwner(**parse_json(self.lock_file.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(_HEARTBEAT_S):
            with suppress(OSError):  # a busy file server must not end the run
                os.utime(self.lock_file)


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Processes that share a folder or file do this one after the other. Best effort: not every file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
