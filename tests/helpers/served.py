"""Servers for tests: one in a thread of this process, with an engine that the test has made."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mindspeed_mm.tasks.requests.access import Access
from mindspeed_mm.tasks.serve.app import Engine, build_app
from mindspeed_mm.tasks.serve.limits import Limits
from mindspeed_mm.tasks.serve.listening import build_server, listen

NAME = "tiny"
START_S = 20.0


@contextmanager
def served(engine: Engine, limits: Limits | None = None, access: Access | None = None) -> Iterator[str]:
    """The address of a server around an engine, without `/v1`. When it ends, so does the engine."""
    limits = limits or Limits()
    listening = listen("127.0.0.1", 0)
    server = build_server(build_app(engine, NAME, limits, access or Access()), limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        begun_s = time.monotonic()
        while not server.started:
            assert thread.is_alive() and time.monotonic() - begun_s < START_S
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(START_S)
        listening.close()
