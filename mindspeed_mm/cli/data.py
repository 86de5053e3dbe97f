"""`mm data check | preview | stats`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.file_writing import write_page
from mindspeed_mm.core.terminal import say, say_json

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

PATH = click.Path(path_type=Path)
POSITIVE = click.IntRange(min=1)


@click.group(epilog=EXAMPLES)
def command() -> None:
    """Look at the rows of a configuration before training on them."""


@command.command(epilog=CHECK_EXAMPLES, short_help="Find what is wrong with the rows, and how to fix it.")
@click.argument("config", type=PATH)
@click.argument("overrides", nargs=-1)
@click.option("--decode", is_flag=True, help="Decode every image, clip and sound; otherwise only its header is read.")
@click.option("--limit", type=POSITIVE, help="Number of rows to read, spread evenly over the data.")
@click.option("--bad-rows", type=PATH, help="File that every bad row is written to, one JSON object per line.")
@click.option("--nproc", type=POSITIVE, help="Number of ranks that share the global batch; default: WORLD_SIZE, or 1.")
@click.option(
    "--workers", type=click.IntRange(min=0), help="Number of processes that read; default: by the number of cores."
)
@click.option("--validation", is_flag=True, help="Use the validation rows instead of the training rows.")
@click.option("--html", type=PATH, help="Write the result as one self-contained HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def check(
    ctx: click.Context,
    config: Path,
    overrides: tuple[str, ...],
    decode: bool,
    limit: int | None,
    bad_rows: Path | None,
    nproc: int | None,
    workers: int | None,
    validation: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Read every row of CONFIG once and say what is wrong, what to change, and how many rows that saves.

    Looks at media, roles, placeholders, label masks, rows that are too long or occur twice, the chat template and the
    shares of a mixture. OVERRIDES are section.key=value. Exit code 4 when training would stop.
    """
    from mindspeed_mm.tasks.data import check as task  # torch: the help does without
    from mindspeed_mm.tasks.data.page import check_page
    from mindspeed_mm.tasks.data.paint import Paint
    from mindspeed_mm.tasks.data.words import check_lines

    result = task.run(
        config, overrides, decode=decode, limit=limit, nproc=nproc, workers=workers, validation=validation
    )
    if bad_rows is not None:
        task.write_bad_rows(bad_rows, result.bad)
    if html is not None:
        write_page(html, check_page(result), "--html")
    _print(result.to_dict() if as_json else check_lines(result, Paint.of(sys.stdout)))
    ctx.exit(result.exit_code)


@command.command(epilog=PREVIEW_EXAMPLES, short_help="Show rows as the tokens that the model gets.")
@click.argument("config", type=PATH)
@click.argument("overrides", nargs=-1)
@click.option("--rows", help="Row numbers, counted from 0 and separated by commas: 0,5.")
@click.option("--row-id", "row_ids", multiple=True, help="A row by its id, or by its location: train.jsonl:12.")
@click.option("--count", type=POSITIVE, help="Number of rows to show, in the order of training; default: 3.")
@click.option("--tokens", is_flag=True, help="List every token with its id and weight.")
@click.option(
    "--nproc", type=POSITIVE, default=1, show_default=True, help="Number of ranks that steps are divided among."
)
@click.option("--validation", is_flag=True, help="Use the validation rows instead of the training rows.")
@click.option("--html", type=PATH, help="Write one self-contained HTML page with the media.")
@click.option("--json", "as_json", is_flag=True, help="Print ids, labels and everything else as JSON.")
def preview(
    config: Path,
    overrides: tuple[str, ...],
    rows: str | None,
    row_ids: tuple[str, ...],
    count: int | None,
    tokens: bool,
    nproc: int,
    validation: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Show the exact tokens of some rows of CONFIG, trained ones in colour, with their media.

    Without --rows and --row-id: the first rows in the order of training, and the first micro-batch as the model gets
    it, with the borders of packs. Where there are no colours, trained tokens stand between « and ».
    """
    from mindspeed_mm.tasks.data import preview as task
    from mindspeed_mm.tasks.data.page import preview_page
    from mindspeed_mm.tasks.data.paint import Paint
    from mindspeed_mm.tasks.data.preview_words import preview_lines

    found = task.run(
        config,
        overrides,
        rows=_numbers(rows),
        row_ids=row_ids,
        count=count,
        ranks=nproc,
        validation=validation,
    )
    if html is not None:
        write_page(html, preview_page(found), "--html")
    _print(found.to_dict() if as_json else preview_lines(found, Paint.of(sys.stdout), tokens=tokens))


@command.command(epilog=STATS_EXAMPLES, short_help="Describe lengths, media and how full batches are.")
@click.argument("config", type=PATH)
@click.argument("overrides", nargs=-1)
@click.option("--limit", type=POSITIVE, help="Number of rows to read, spread evenly over the data.")
@click.option(
    "--workers", type=click.IntRange(min=0), help="Number of processes that read; default: by the number of cores."
)
@click.option("--validation", is_flag=True, help="Use the validation rows instead of the training rows.")
@click.option("--html", type=PATH, help="Write the result as one self-contained HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def stats(
    config: Path,
    overrides: tuple[str, ...],
    limit: int | None,
    workers: int | None,
    validation: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Describe the rows of CONFIG: lengths, media, share of trained tokens, and how full batches and packs would be."""
    from mindspeed_mm.tasks.data import stats as task
    from mindspeed_mm.tasks.data.page import stats_page
    from mindspeed_mm.tasks.data.paint import Paint
    from mindspeed_mm.tasks.data.words import stats_lines

    found = task.run(config, overrides, limit=limit, workers=workers, validation=validation)
    if html is not None:
        write_page(html, stats_page(found), "--html")
    _print(found.to_dict() if as_json else stats_lines(found, Paint.of(sys.stdout)))


def _print(result: dict[str, object] | list[str]) -> None:
    if isinstance(result, dict):
        say_json(result, indent=2)
    else:
        say("\n".join(result), styled=True)  # colours were decided on already


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdigit() for word in words):
        raise UsageError(f"'{text}' is not a list of numbers", key="--rows", way_out="Write --rows 0,5.")
    return list(map(int, words))
