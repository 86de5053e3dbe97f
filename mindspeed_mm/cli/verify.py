"""The command `mm verify`: compares what a parallel plan computes with what one process computes."""

from __future__ import annotations

from pathlib import Path

import click

from mindspeed_mm.core.terminal import say, say_json
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
@click.option("--inject", metavar="FAULT", help="Plant a fault, to see that it is detected (exit code 5).")
@click.option("--nproc", type=click.IntRange(min=1), help="Number of processes; default: as few as the plan needs.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparisons as JSON.")
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
    """Verify that the plan of CONFIG computes what one process computes. OVERRIDES are section.key=value.

    Trains two steps on your own rows in fp64 on the CPU and compares loss, every gradient, clip norm and weights: under
    the plan, with accumulated micro-batches, and after a resume. The model is yours with fewer and narrower layers, at
    least one of each kind. Exit code 5 when something differs. Nothing is written outside a temporary folder.
    """
    found = task.run(config, overrides, nproc=nproc, full=full, fault=inject)
    if as_json:
        say_json(found.to_dict(), indent=2)
    else:
        say("\n".join(found.lines()))
    ctx.exit(task.exit_code_of(found))
