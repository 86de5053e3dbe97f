"""The command `mm ui`: shows the runs of a folder in a browser."""

from __future__ import annotations

import importlib.util

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.requests.serve import UiRequest, check_ui_request

EXAMPLES = """
\b
Examples:
  mm ui
  mm ui experiments --port 9010 --also /data/rows
  mm ui experiments --host 0.0.0.0 --key-file key.txt --read-only
"""
_NEEDED = ("starlette", "uvicorn")


@click.command(epilog=EXAMPLES)
@takes(UiRequest)
def command(request: UiRequest) -> None:
    """Show the runs below FOLDER (default: the working directory) in a browser.

    The page lists runs with their state, draws curves while they grow, compares runs, makes and checks configurations,
    shows what a model gets of its rows, and starts and stops runs. Looking changes nothing. SIGTERM or Ctrl-C ends the
    page; runs go on.
    """
    if lacking := [package for package in _NEEDED if importlib.util.find_spec(package) is None]:
        way_out = "Install the extra: pip install 'mindspeed-mm[ui]'."
        raise MachineError(f"{' and '.join(lacking)} not installed", way_out=way_out)
    access = check_ui_request(request)
    from mindspeed_mm.tasks.ui import board  # torch and the web server: the help does without

    def announce(address: str) -> None:
        if request.as_json:
            say_json({"folder": str(request.folder), "address": address})
        else:
            say(f"The runs of {request.folder.resolve()} are at {address}")

    board.run(request, access, announce)
