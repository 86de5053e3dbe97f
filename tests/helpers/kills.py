"""Kill -9 before each change that some work makes to the disk, in a copy of this process: cheap, since everything has
been imported.

Python reports what it asks of the operating system to its audit hooks: files opened for writing, names given, changed
and taken away. Folders that change places, and files that safetensors writes, are not reported, and are counted here.

A copy has one thread, and waits for ever where another thread of the original held a lock: tests whose work uses
libraries are `alone` in a process. And a worker of pytest grows to gigabytes, so that copying it takes a tenth of a
second: work that imports little is done in copies of a process that has imported little.
"""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mindspeed_mm.core import exchange

_EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate", "os.symlink", "os.link"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def everything(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes, every link with where it leads; folders are not followed."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = os.fsencode(path.readlink())
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


class _Counter:
    """Counts changes below a folder, and kills this process before the one of a given number, or raises there."""

    def __init__(self, below: Path, fatal: int | None, raises: type[BaseException] | None) -> None:
        self.count, self._fatal, self._below, self._raises = 0, fatal, str(below), raises
        self.raised = False

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Of `sys.addaudithook`."""
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES
        if (event in _EVENTS or is_write) and self._is_below(arguments[0]):
            self.change()

    def change(self) -> None:
        """One is about to be made."""
        number = self.count
        self.count += 1
        if number == self._fatal:
            if self._raises is not None:
                self.raised = True
                raise self._raises
            os.kill(os.getpid(), signal.SIGKILL)

    def watch_the_rest(self) -> None:
        """What the audit does not see."""
        exchange.exchange = self._counted(exchange.exchange)
        if (library := sys.modules.get("safetensors.torch")) is not None:  # importing torch here would take seconds
            library.save_file = self._counted(library.save_file)  # type: ignore[attr-defined]

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.change()
            return real(*args, **kwargs)

        return counted

    def _is_below(self, path: Any) -> bool:
        # Names relative to an open folder come from `shutil.rmtree`, which takes away what was put aside: counted.
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        return text.startswith(self._below) or not text.startswith("/")


def nothing() -> None:
    """What most work needs before it."""


def without_exchange() -> None:
    """Let folders change places in two renames, as on a file system that cannot exchange them."""
    exchange.exchange = lambda one, other: False


@dataclass(frozen=True)
class _Job:
    """Work that a copy of a process does."""

    folder: Path
    work: Callable[[], object]
    before: Callable[[], None]
    """Done first, without counting its changes."""
    raises: type[BaseException] | None
    fatal: int | None = None
    """The change before which the copy is killed, or `raises` is raised."""
    told: Path | None = None
    """The file that is told the number of changes."""


def killed_before_each_change(
    folder: Path,
    begin: Callable[[], object],
    work: Callable[[], object],
    chosen: Callable[[int], Collection[int]] = range,
    raises: type[BaseException] | None = None,
    *,
    small: bool = False,
    before: Callable[[], None] = nothing,
) -> Iterator[int]:
    """Do `work` again and again, each time killed before another change that it makes below `folder`.

    Args:
        folder: Made anew, and filled by `begin`, before each time.
        begin: What is there before.
        work: In a copy of this process.
        chosen: From the number of changes to those that are tried; default: all.
        raises: Raise this instead of the change; the work may clean up after itself.
        small: Copy a process that has imported only the files of `work` and `before`, which must be picklable.
        before: What the copy does before the work.

    Yields:
        The number of the change, after the kill.
    """
    copied = _in_a_copy_of_a_small_process if small else _in_a_copy
    job = _Job(folder, work, before, raises)
    _begin_anew(folder, begin)
    told = folder.parent / f"{folder.name}.changes"
    assert copied(replace(job, told=told)) == 0
    changes = int(told.read_text())
    told.unlink()
    assert changes, "the work changes nothing"
    for change in chosen(changes):
        _begin_anew(folder, begin)
        code = copied(replace(job, fatal=change))
        expected = -signal.SIGKILL if raises is None else 1
        assert code == expected, f"before change {change} of {changes}: exit code {code}"
        yield change


def _begin_anew(folder: Path, begin: Callable[[], object]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    begin()


def _in_a_copy(job: _Job) -> int:
    """The exit code of a copy of this process that does the work, negative when a signal ended it."""
    pid = os.fork()
    if pid == 0:
        _work_and_leave(job)
    return wait_for(pid)


def _in_a_copy_of_a_small_process(job: _Job) -> int:
    asked = _small_process()
    asked.send(job)
    code: int = asked.recv()
    return code


@functools.cache
def _small_process() -> Connection:
    """Started once, as a fresh interpreter; it ends with this process."""
    here, there = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=_copy_on_demand, args=(there,), daemon=True).start()
    there.close()
    return here


def _copy_on_demand(asked: Connection) -> None:
    while True:
        try:
            job = asked.recv()  # imports the files of the work
        except EOFError:
            return
        asked.send(_in_a_copy(job))


def _work_and_leave(job: _Job) -> None:
    code = 1
    counter = _Counter(job.folder, job.fatal, job.raises)
    try:
        faulthandler.enable()
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)  # threads of the original are not there
        os.fsync = lambda descriptor: None  # nothing here is about a power failure: the disk need not be waited for
        job.before()
        counter.watch_the_rest()
        sys.addaudithook(counter.hook)
        job.work()
        if job.told is not None:
            job.told.write_text(str(counter.count))
        code = 0
    except BaseException:  # noqa: BLE001 (the border of a process)
        if not counter.raised:
            traceback.print_exc()
    finally:
        os._exit(code)


def wait_for(pid: int, limit_s: float = 60.0) -> int:
    """The exit code of a copy, negative when a signal ended it."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGABRT)  # it says where it stands, on stderr
    os.waitpid(pid, 0)
    raise AssertionError(f"still running after {limit_s} s")
