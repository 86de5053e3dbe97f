"""`mm verify`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mindspeed_mm.tasks.verify import verify as task
from mindspeed_mm.tasks.verify.faults import FAULTS

EXAMPLES = (
    """
\b
Examples:
  mm verify examples/digits/digits_tiny_config.yaml parallel.tensor_parallel_size=2
  mm verify run.yaml --inject averaged-gradients

\b
Faults:
"""
    + "\n".join(f"  {name:<24}{fault.what}" for name, fault in FAULTS.items())
    + "\n"
)


@click.command(epilog=EXAMPLES)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--full", is_flag=True, help="Use the real model with its weights instead of a small one.")
@click.option("--inject", metavar="FAULT", help="Plant a fault, which must be detected (exit code 5).")
@click.option("--nproc", type=click.IntRange(min=1), help="Number of processes; default: as few as the plan needs.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    config: Path,
    overrides: tuple[str, ...],
    full: bool,
    inject: str | None,
    nproc: int | None,
    as_json: bool,
) -> None:
    """Show that CONFIG computes as planned what one process computes. OVERRIDES are section.key=value.

    Two steps on your own rows, in fp64 on the CPU: loss, every gradient, clip norm and weights, as planned, accumulated
    and resumed. The model is yours with fewer and narrower layers, of every kind that it has. Exit code 5 when
    something is off. Nothing is written outside of a temporary folder.
    """
    found = task.run(config, overrides, nproc=nproc, full=full, fault=inject)
    click.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if as_json else "\n".join(found.lines()))
    ctx.exit(task.exit_code_of(found))
