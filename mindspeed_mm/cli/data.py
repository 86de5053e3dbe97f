"""`mm data check | preview | stats`."""

from __future__ import annotations

import sys

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.file_writing import write_page
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.requests.data import DataCheckRequest, DataPreviewRequest, DataStatsRequest

EXAMPLES = """
\b
Examples:
  mm data check run.yaml --bad-rows bad.jsonl
  mm data preview run.yaml --count 3 --html preview.html
  mm data stats run.yaml data.dataset_param.basic_parameters.cutoff_len=4096

All three read the data without a model or an accelerator, and accept --json.
"""
CHECK_EXAMPLES = """
\b
Examples:
  mm data check run.yaml
  mm data check run.yaml --decode --bad-rows bad.jsonl --nproc 8
"""
PREVIEW_EXAMPLES = """
\b
Examples:
  mm data preview run.yaml
  mm data preview run.yaml --rows 0,5 --tokens
  mm data preview run.yaml --row-id train.jsonl:12 --html preview.html
"""
STATS_EXAMPLES = """
\b
Examples:
  mm data stats run.yaml
  mm data stats run.yaml --limit 20000 --html stats.html
"""


@click.group(epilog=EXAMPLES)
def command() -> None:
    """Look at the rows of a configuration before training on them."""


@command.command(epilog=CHECK_EXAMPLES, short_help="Find what is wrong with the rows, and how to fix it.")
@takes(DataCheckRequest)
def check(request: DataCheckRequest) -> None:
    """Read every row of CONFIG once and say what is wrong, what to change, and how many rows that saves.

    Looks at media, roles, placeholders, label masks, rows that are too long or occur twice, the chat template and the
    shares of a mixture. OVERRIDES are section.key=value. Exit code 4 when training would stop.
    """
    from mindspeed_mm.tasks.data import check as task  # torch: the help does without
    from mindspeed_mm.tasks.data.page import check_page
    from mindspeed_mm.tasks.data.words import Paint, check_lines

    result = task.run(request)
    if request.bad_rows is not None:
        task.write_bad_rows(request.bad_rows, result.bad)
    if request.html is not None:
        write_page(request.html, check_page(result), "--html")
    _print(result.to_dict() if request.as_json else check_lines(result, Paint.of(sys.stdout)))
    click.get_current_context().exit(result.exit_code)


@command.command(epilog=PREVIEW_EXAMPLES, short_help="Show rows as the tokens that the model gets.")
@takes(DataPreviewRequest)
def preview(request: DataPreviewRequest) -> None:
    """Show the exact tokens of some rows of CONFIG, trained ones in colour, with their media.

    Without --rows and --row-id: the first rows in the order of training, and the first micro-batch as the model gets
    it, with the borders of packs. Where there are no colours, trained tokens stand between « and ».
    """
    from mindspeed_mm.tasks.data import preview as task
    from mindspeed_mm.tasks.data.page import preview_page
    from mindspeed_mm.tasks.data.words import Paint, preview_lines

    found = task.run(request)
    if request.html is not None:
        write_page(request.html, preview_page(found), "--html")
    _print(found.to_dict() if request.as_json else preview_lines(found, Paint.of(sys.stdout), tokens=request.tokens))


@command.command(epilog=STATS_EXAMPLES, short_help="Describe lengths, media and how full batches are.")
@takes(DataStatsRequest)
def stats(request: DataStatsRequest) -> None:
    """Describe the rows of CONFIG: lengths, media, share of trained tokens, and how full batches and packs would be."""
    from mindspeed_mm.tasks.data import stats as task
    from mindspeed_mm.tasks.data.page import stats_page
    from mindspeed_mm.tasks.data.words import Paint, stats_lines

    found = task.run(request)
    if request.html is not None:
        write_page(request.html, stats_page(found), "--html")
    _print(found.to_dict() if request.as_json else stats_lines(found, Paint.of(sys.stdout)))


def _print(result: dict[str, object] | list[str]) -> None:
    if isinstance(result, dict):
        say_json(result, indent=2)
    else:
        say("\n".join(result), styled=True)  # colours were decided on already
