"""`mm schema`."""

from __future__ import annotations

import json

import click

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
        click.echo(json.dumps(task.as_dict(key), indent=2, ensure_ascii=False))
    else:
        click.echo(task.as_text(task.run(key)))
