"""Servers for tests: one in a thread of this process, with an engine that the test has made."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindspeed_mm.tasks.requests.serve import Access, UiRequest, check_ui_request
from mindspeed_mm.tasks.serve.app import Engine, build_app
from mindspeed_mm.tasks.serve.guard import Guard
from mindspeed_mm.tasks.serve.limits import Limits, WireLimits
from mindspeed_mm.tasks.serve.listening import build_server, listen
from mindspeed_mm.tasks.ui import board
from mindspeed_mm.tasks.ui.jobs import Jobs

NAME = "tiny"
START_S = 20.0


@contextmanager
def listening(app: Guard, limits: WireLimits) -> Iterator[str]:
    """The address of an application that listens in a thread of this process."""
    held = listen("127.0.0.1", 0)
    server = build_server(app, limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [held]}, daemon=True)
    thread.start()
    try:
        begun_s = time.monotonic()
        while not server.started:
            assert thread.is_alive() and time.monotonic() - begun_s < START_S
            time.sleep(0.005)
        yield f"http://127.0.0.1:{held.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(START_S)
        held.close()


@contextmanager
def served(engine: Engine, limits: Limits | None = None, access: Access | None = None) -> Iterator[str]:
    """The address of a server around an engine, without `/v1`. When it ends, so does the engine."""
    limits = limits or Limits()
    with listening(build_app(engine, NAME, limits, access or Access()), limits) as address:
        yield address


@contextmanager
def served_board(folder: Path, access: Access | None = None, **asked: Any) -> Iterator[str]:
    """The address of `mm ui` of a folder. Jobs that are left are ended.

    Args:
        folder: What is shown.
        access: Who may look.
        asked: Further fields of the request.
    """
    request = UiRequest(folder, **asked)
    jobs = Jobs(folder.resolve())
    try:
        with listening(board.build_app(request, access or check_ui_request(request), jobs), request.limits) as address:
            yield address
    finally:
        jobs.end()
        for job in jobs.listed():
            if job["exit_code"] is None:
                jobs.stop(job["job"])
