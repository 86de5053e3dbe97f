"""The command `mm verify`: compares what a parallel plan computes with what one process computes."""

from __future__ import annotations

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.requests.measure import VerifyRequest
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
@takes(VerifyRequest)
def command(request: VerifyRequest) -> None:
    """Verify that the plan of CONFIG computes what one process computes. OVERRIDES are section.key=value.

    Trains two steps on your own rows in fp64 on the CPU and compares loss, every gradient, clip norm and weights: under
    the plan, with accumulated micro-batches, and after a resume. The model is yours with fewer and narrower layers, at
    least one of each kind. Exit code 5 when something differs. Nothing is written outside a temporary folder.
    """
    found = task.run(request)
    if request.as_json:
        say_json(found.to_dict(), indent=2)
    else:
        say("\n".join(found.lines()))
    click.get_current_context().exit(task.exit_code_of(found))
