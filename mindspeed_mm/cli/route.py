"""The command `mm route`: finds the models and commands that lead to a wish."""

from __future__ import annotations

from dataclasses import asdict

import click

from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.models import routes

EXAMPLES = """
\b
Examples:
  mm route "fine-tune a speech recogniser"
  mm route "teach Qwen3-VL to read receipts"
  mm route "my run is too slow"
"""


@click.command(epilog=EXAMPLES)
@click.argument("wish", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print the families, commands and page as JSON.")
def command(wish: tuple[str, ...], as_json: bool) -> None:
    """Tell which models and commands lead to WISH, and which page to read."""
    route = routes.find(" ".join(wish))
    if as_json:
        say_json(asdict(route), indent=2)
    else:
        say(routes.as_text(route))
