"""`mm ui`: listens, and ends when it is told to. Servers that it has started end with it; runs go on."""

from __future__ import annotations

import signal
from collections.abc import Callable

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision
from mindspeed_mm.tasks.requests.access import Access
from mindspeed_mm.tasks.requests.ui import UiRequest
from mindspeed_mm.tasks.serve.listening import build_server, listen, shown_host
from mindspeed_mm.tasks.ui.app import build_app
from mindspeed_mm.tasks.ui.jobs import Jobs


def run(request: UiRequest, access: Access, say: Callable[[str], None]) -> None:
    """Show a folder until a signal ends it.

    Args:
        request: What is shown, and where.
        access: Who may look, as `check_request` found it.
        say: Is told the address.

    Raises:
        MachineError: The address is taken, or is none of this machine's.
    """
    listening = listen(request.host, request.port)
    jobs = Jobs(request.folder.resolve())
    try:
        ensure_torchvision()
        server = build_server(build_app(request, access, jobs), request.limits)
        # uvicorn raises the signal that ended it once more, for whoever was there before.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        say(f"http://{shown_host(request.host)}:{listening.getsockname()[1]}/")
        server.run(sockets=[listening])
    finally:
        jobs.end()
        listening.close()
