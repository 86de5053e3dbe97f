"""The command `mm route`: finds the models and commands that lead to a wish."""

from __future__ import annotations

from dataclasses import asdict

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.models import routes
from mindspeed_mm.tasks.requests.look import RouteRequest

EXAMPLES = """
\b
Examples:
  mm route "fine-tune a speech recogniser"
  mm route "teach Qwen3-VL to read receipts"
  mm route "my run is too slow"
"""


@click.command(epilog=EXAMPLES)
@takes(RouteRequest)
def command(request: RouteRequest) -> None:
    """Tell which models and commands lead to WISH, and which page to read."""
    route = routes.find(" ".join(request.wish))
    if request.as_json:
        say_json(asdict(route), indent=2)
    else:
        say(routes.as_text(route))
