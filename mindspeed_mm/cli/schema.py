"""The command `mm schema`: explains a configuration key, or prints the JSON schema."""

from __future__ import annotations

import click

from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks import schema as task

EXAMPLES = """
\b
Examples:
  mm schema training.lr
  mm schema --json > mindspeed-mm.schema.json
"""


@click.command(epilog=EXAMPLES)
@click.argument("key", default="")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: without KEY, a JSON schema for editors.")
def command(key: str, as_json: bool) -> None:
    """Explain KEY (training.lr), every key of a section (training.lora), or all."""
    if as_json:
        say_json(task.as_dict(key), indent=2)
    else:
        say(task.as_text(task.run(key)))
