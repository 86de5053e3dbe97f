"""The command `mm serve`: answers clients of OpenAI's interface over HTTP."""

from __future__ import annotations

import importlib.util

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.cli.sharing import check_inputs, import_plugins, share
from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.requests.serve import ServeRequest, check_request

EXAMPLES = """
\b
Examples:
  mm serve runs/mine
  mm serve runs/mine --port 9000 --key-file key.txt --media-folder data/images
  mm serve models/FLUX.1-dev --batch-size 2
  mm serve models/large --nproc 8 --plan examples/qwen3vl/qwen3vl_8B_config.yaml
"""
_NEEDED = ("starlette", "uvicorn", "werkzeug")


@click.command(epilog=EXAMPLES)
@takes(ServeRequest)
def command(request: ServeRequest) -> int:
    """Serve MODEL, a Hugging Face folder, a generator's folder or a run, to clients of OpenAI's interface.

    A page to try it stands at the address itself; /v1 is the base address for clients. SIGTERM or Ctrl-C ends it once
    everything that runs is answered.
    """
    if lacking := [package for package in _NEEDED if importlib.util.find_spec(package) is None]:
        way_out = "Install the extra: pip install 'mindspeed-mm[serve]'."
        raise MachineError(f"{' and '.join(lacking)} not installed", way_out=way_out)
    check_inputs(request)
    access = check_request(request)
    import_plugins(request.plugins)
    from mindspeed_mm.tasks.serve import serve  # torch and the web server: the help does without

    def announce(address: str) -> None:
        told = {"model": request.shown_name, "address": address}
        if request.as_json:
            say_json(told)
        else:
            say(f"Serving {request.model} at {address}")

    return share("serve", request, lambda: serve.run(request, access, announce))
