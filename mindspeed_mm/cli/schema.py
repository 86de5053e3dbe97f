"""The command `mm schema`: explains a configuration key, or prints the JSON schema."""

from __future__ import annotations

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks import schema as task
from mindspeed_mm.tasks.requests.look import SchemaRequest

EXAMPLES = """
\b
Examples:
  mm schema training.lr
  mm schema --json > mindspeed-mm.schema.json
"""


@click.command(epilog=EXAMPLES)
@takes(SchemaRequest)
def command(request: SchemaRequest) -> None:
    """Explain KEY (training.lr), every key of a section (training.lora), or all."""
    if request.as_json:
        say_json(task.as_dict(request.key), indent=2)
    else:
        say(task.as_text(task.run(request.key)))
