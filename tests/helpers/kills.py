"""Kill -9 before each change that some work makes to the disk, in a copy of this process: cheap, since everything has
been imported.

Python reports what it asks of the operating system to its audit hooks: files opened for writing, names given, changed
and taken away. Folders that change places, and files that safetensors writes, are not reported, and are counted here.

A copy has one thread, and waits for ever where another thread of the original held a lock: tests whose work uses
libraries are `alone` in a process.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator
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


def killed_before_each_change(
    folder: Path,
    begin: Callable[[], None],
    work: Callable[[], object],
    chosen: Callable[[int], Collection[int]] = range,
    raises: type[BaseException] | None = None,
) -> Iterator[int]:
    """Do `work` again and again, each time killed before another change that it makes below `folder`.

    Args:
        folder: Made anew, and filled by `begin`, before each time.
        begin: What is there before.
        work: In a copy of this process.
        chosen: From the number of changes to those that are tried; default: all.
        raises: Raise this instead of the change; the work may clean up after itself.

    Yields:
        The number of the change, after the kill.
    """
    changes = _changes_of(folder, begin, work)
    assert changes, "the work changes nothing"
    for change in chosen(changes):
        _begin_anew(folder, begin)
        code = _in_a_copy(folder, work, change, raises=raises)
        expected = -signal.SIGKILL if raises is None else 1
        assert code == expected, f"before change {change} of {changes}: exit code {code}"
        yield change


def _changes_of(folder: Path, begin: Callable[[], None], work: Callable[[], object]) -> int:
    _begin_anew(folder, begin)
    told = folder.parent / f"{folder.name}.changes"
    assert _in_a_copy(folder, work, None, told) == 0
    changes = int(told.read_text())
    told.unlink()
    return changes


def _begin_anew(folder: Path, begin: Callable[[], None]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    begin()


def _in_a_copy(
    folder: Path,
    work: Callable[[], object],
    fatal: int | None,
    told: Path | None = None,
    raises: type[BaseException] | None = None,
) -> int:
    """The exit code of a copy of this process that does the work, negative when a signal ended it."""
    pid = os.fork()
    if pid == 0:
        _work_and_leave(_Counter(folder, fatal, raises), work, told)
    return wait_for(pid)


def _work_and_leave(counter: _Counter, work: Callable[[], object], told: Path | None) -> None:
    code = 1
    try:
        faulthandler.enable()
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)  # threads of the original are not there
        os.fsync = lambda descriptor: None  # nothing here is about a power failure: the disk need not be waited for
        counter.watch_the_rest()
        sys.addaudithook(counter.hook)
        work()
        if told is not None:
            told.write_text(str(counter.count))
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
