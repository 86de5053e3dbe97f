"""The server that ranks are forked from, as a copy of the tests' own process: a fresh one imports for six seconds what
is there already."""

from __future__ import annotations

import importlib
import logging
import multiprocessing.connection
import os
import random
import select
import socket
import sys
from multiprocessing import forkserver
from pathlib import Path

PRELOADED = "tests.helpers.preload"
_was_asked = False
threads_beside: list[str] = []
"""What kept the copy from being taken: names of threads, or that they cannot be counted here."""


def serve_from_a_copy() -> None:
    """Fork the server that `multiprocessing` would start, before the first test: tests leave threads, and whatever they
    change. Does nothing afterwards, where no test uses ranks, and where more threads run than that which xdist listens
    with: a copy would wait for ever for what they hold."""
    global _was_asked
    was_asked, _was_asked = _was_asked, True
    if was_asked or "tests.helpers.distributed" not in sys.modules:
        return
    server = forkserver._forkserver  # type: ignore[attr-defined]
    allowed = 2 if "PYTEST_XDIST_WORKER" in os.environ else 1
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")] or ["not Linux"] * 3
    if len(names) > allowed:
        threads_beside.extend(names)
        return
    address = multiprocessing.connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        # Whoever may ask holds the writing end; the server ends when all of them have.
        alive, held = os.pipe()
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if stream is not None:
                stream.flush()
        pid = os.fork()
        if pid == 0:
            os.close(held)
            _serve(listener.detach(), alive)
    os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, held, pid


def _serve(listener: int, alive: int) -> None:
    try:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        logging.root.handlers.clear()  # of pytest
        asked, *_ = select.select([listener, alive], [], [])
        if listener in asked:
            importlib.import_module(PRELOADED)
            random.seed(0)
            sys.modules["numpy"].random.seed(0)
            sys.modules["torch"].default_generator.manual_seed(0)
            forkserver.main(listener, alive, [])
    finally:
        os._exit(0)
