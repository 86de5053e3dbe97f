"""The command `mm quickstart`: trains a first model on data that the package brings."""

from __future__ import annotations

import os
from dataclasses import asdict

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.errors import ExitCode
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.requests.init import QuickstartRequest

EXAMPLES = """
\b
Examples:
  mm quickstart
  mm quickstart /tmp/digits
  mm quickstart --json > summary.json
"""


@click.command(epilog=EXAMPLES)
@takes(QuickstartRequest)
def command(request: QuickstartRequest) -> int:
    """Train, export, evaluate and ask a small vision-language model on this machine, in about three minutes.

    The model is a Qwen3-VL of 0.4 million parameters; the data are 1,797 scans of handwritten digits that come with the
    package. Nothing is downloaded. Everything is written to FOLDER (default: runs/digits), which must be empty or of an
    earlier quick start. Run again, it reuses what is there; an interrupted training continues.

    The exit code is 5 where fewer than 95 % of the held-out digits are named correctly.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: more threads than free cores slow one another down
    from mindspeed_mm.quickstart.quickstart import GOAL, Quickstart, next_steps  # torch: the help does without

    learned = Quickstart(request.folder, err=request.as_json).run()
    if not learned.is_good:
        say(f"fewer than {GOAL:.0%} of the held-out digits are named correctly", err=True)
    if request.as_json:
        say_json(asdict(learned), indent=2)
    else:
        say("\nNext:\n" + "\n".join(f"  {line}" for line in next_steps(learned)))
    if learned.is_good:
        return ExitCode.OK
    return ExitCode.DIVERGED
