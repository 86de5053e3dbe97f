"""Processes that have imported nothing but a few libraries, for tests of what an import does or needs.

Importing torch and transformers takes seconds of each. A server imports them once, in an interpreter of its own, and is
copied for each program.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0


def run_after(
    begin: str, program: str, *words: str, cwd: Path = ROOT, path: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process that has run `begin` and nothing else.

    Args:
        begin: A program of imports. It is run once for all that begin so.
        program: What to run.
        words: The program's arguments.
        cwd: Where it runs.
        path: Folders that come first when it imports.

    Returns:
        How it ended, as of `python -c`.
    """
    with tempfile.TemporaryDirectory(prefix="fresh-") as name:
        out, err = Path(name, "out"), Path(name, "err")
        job = {"program": program, "words": words, "cwd": str(cwd), "path": [str(each) for each in path]}
        server = _server(begin)
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(job | {"out": str(out), "err": str(err)}) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the server of processes has ended"
        return subprocess.CompletedProcess(program, int(answer), out.read_text(), err.read_text())


@functools.cache
def _server(begin: str) -> subprocess.Popen[str]:
    """It ends with this process."""
    command = [sys.executable, "-m", "tests.helpers.fresh_process", begin]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _serve(begin: str) -> None:
    exec(compile(begin, "<begin>", "exec"), {"__name__": "__begin__"})
    while line := sys.stdin.readline():
        child = os.fork()
        if not child:
            _run(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(job: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT), number)
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        os.chdir(job["cwd"])
        sys.argv, sys.path = ["-c", *job["words"]], ["", *job["path"], *sys.path[1:]]
        exec(compile(job["program"], "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 (the border of a process)
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
