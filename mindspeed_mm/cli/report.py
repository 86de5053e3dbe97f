"""The command `mm report`: writes one HTML page about runs."""

from __future__ import annotations

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.requests.look import ReportRequest

EXAMPLES = """
\b
Examples:
  mm report runs/digits/run
  mm report runs/first runs/second --out comparison.html
"""


@click.command(epilog=EXAMPLES)
@takes(ReportRequest)
def command(request: ReportRequest) -> None:
    """Write one self-contained HTML page about RUNS: curves, accuracy, held-out samples, environment, configuration.

    Several runs are drawn into the same charts, and compared with the first: scores with paired tests, answers to the
    same questions, and what differs in their configurations.
    """
    from mindspeed_mm.tasks.report import report  # matplotlib and pillow: the help does without

    written = report.run(request.runs, request.out)
    if request.as_json:
        say_json({"report": str(written)})
    else:
        say(str(written))
