"""`mm config`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mindspeed_mm.tasks import config as task

EXAMPLES = """
\b
Examples:
  mm config run.yaml
  mm config run.yaml training.lr=2e-5 --given
"""


@click.command(epilog=EXAMPLES)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--given", is_flag=True, help="Leave out the defaults.")
@click.option("--json", "as_json", is_flag=True, help="Print configuration, origins and warnings as JSON.")
def command(config: Path, overrides: tuple[str, ...], given: bool, as_json: bool) -> None:
    """Show CONFIG as a run would see it, with the origin of each value: default, file and line, command line, derived.

    OVERRIDES are section.key=value, each parsed as YAML.
    """
    resolved = task.run(config, overrides)
    if as_json:
        click.echo(json.dumps(task.as_dict(resolved), indent=2, ensure_ascii=False))
        return
    for warning in resolved.warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(task.as_text(resolved, only_given=given), nl=False)
