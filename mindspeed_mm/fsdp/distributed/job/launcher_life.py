"""Ties a rank's life to its launcher: without it nothing would end a rank that sleeps.

`mm train --nproc N` and torchrun end the other ranks when one dies. When the launcher itself is killed, ranks that wait
for one another would wait for as long as a collective may take, and hold their devices.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping

from mindspeed_mm.core.errors import ExitCode

LAUNCHER_VARIABLE = "MM_LAUNCHER_PID"
"""Set by `mm … --nproc N` for its ranks."""
ALONE_S = 30.0
"""How long a rank goes on without its launcher: time for the step in work and a save."""
LOOK_S = 0.5


def follow_launcher(
    environment: Mapping[str, str], *, alone_s: float = ALONE_S, leave: Callable[[int], None] = os._exit
) -> None:
    """End this process `alone_s` seconds after the launcher that started it is gone, wherever it stands then. Training
    sees the same sign between steps and saves before. Does nothing in a process that no launcher started."""
    launcher = launcher_of_this_rank(environment)
    if launcher is not None and not any(thread.name == _THREAD for thread in threading.enumerate()):
        threading.Thread(target=_follow, args=(launcher, alone_s, leave), name=_THREAD, daemon=True).start()


def launcher_of_this_rank(environment: Mapping[str, str]) -> int | None:
    """Process id of the launcher that started this process; None without one, as under `srun`."""
    if LAUNCHER_VARIABLE in environment:
        return int(environment[LAUNCHER_VARIABLE])
    if "TORCHELASTIC_RUN_ID" in environment:
        return os.getppid()
    return None


_THREAD = "launcher's life"


def _follow(launcher: int, alone_s: float, leave: Callable[[int], None]) -> None:
    while os.getppid() == launcher:
        time.sleep(LOOK_S)
    time.sleep(alone_s)
    print(f"process {os.getpid()}: its launcher is gone and it cannot go on; it ends", file=sys.stderr, flush=True)
    leave(ExitCode.ENVIRONMENT)
