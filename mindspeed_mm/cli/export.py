"""`mm export`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

EXAMPLES = """
\b
Examples:
  mm export runs/digits exported/digits
  mm export runs/digits exported/digits-400 --step 400 --dtype bf16 --json
"""


@click.command(epilog=EXAMPLES)
@click.argument("run", metavar="RUN_OR_CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=0), help="Which checkpoint of the run; the newest good one otherwise.")
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32", "fp64"]),
    help="Of the weights; otherwise as the model that the run started from has them.",
)
@click.option(
    "--model",
    "model_folder",
    type=click.Path(path_type=Path),
    help="Folder with config.json, tokenizer and processor; otherwise the one that the run started from.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT when it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(
    run: Path, out: Path, step: int | None, dtype: str | None, model_folder: Path | None, overwrite: bool, as_json: bool
) -> None:
    """Write a run's weights as a Hugging Face folder OUT, with configuration, tokenizer, processor and a model card.

    RUN_OR_CHECKPOINT is a run folder or one of its iter_* folders. OUT loads with plain transformers. It appears when
    it is complete.
    """
    from mindspeed_mm.tasks import export  # torch: not for --help

    exported = export.run(run, out, step=step, dtype=dtype, model_folder=model_folder, overwrite=overwrite)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(exported), default=str))
        return
    for note in exported.notes:
        click.echo(f"warning: {note}", err=True)
    click.echo(
        f"{exported.folder}: {exported.tensors:,} tensors, {exported.size_bytes / 2**20:,.1f} MiB, "
        f"from {exported.checkpoint}"
    )
