"""The command `mm report`: writes one HTML page about runs."""

from __future__ import annotations

from pathlib import Path

import click

from mindspeed_mm.core.terminal import say, say_json

EXAMPLES = """
\b
Examples:
  mm report runs/digits/run
  mm report runs/first runs/second --out comparison.html
"""


@click.command(epilog=EXAMPLES)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), help="HTML file to write; default: report.html in the first run."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report's path as JSON.")
def command(runs: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Write one self-contained HTML page about RUNS: curves, accuracy, held-out samples, environment, configuration.

    Several runs are drawn into the same charts, and compared with the first: scores with paired tests, answers to the
    same questions, and what differs in their configurations.
    """
    from mindspeed_mm.tasks.report import report  # matplotlib and pillow: the help does without

    written = report.run(runs, out)
    if as_json:
        say_json({"report": str(written)})
    else:
        say(str(written))
