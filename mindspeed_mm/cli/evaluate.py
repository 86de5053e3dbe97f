"""`mm evaluate`."""

from __future__ import annotations

import json
from pathlib import Path

import click

EXAMPLES = """
\b
Examples:
  mm evaluate runs/digits/run --data runs/digits/data/test.jsonl
  mm evaluate runs/digits/hf --data test.jsonl --out scores --batch-size 128 --max-new-tokens 16
"""


@click.command(epilog=EXAMPLES)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), required=True, help="Rows with questions and answers.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder for the results; default: eval, in the run if any."
)
@click.option("--media-dir", type=click.Path(path_type=Path), help="Where relative media paths of --data start.")
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Questions at a time.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Longest answer.")
@click.option("--lora", type=click.Path(path_type=Path), help="Folder of adapters to put beside the weights.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="YAML whose data section says how rows are laid out and shown; default: the run's.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(
    model: Path,
    data: Path,
    out: Path | None,
    media_dir: Path | None,
    batch_size: int,
    max_new_tokens: int,
    lora: Path | None,
    config: Path | None,
    as_json: bool,
) -> None:
    """Score MODEL, a Hugging Face folder or a run, on rows whose answers are known.

    Every question is answered by greedy generation; an answer counts when it is the expected one, character for
    character (white space aside). Writes results.json and samples.jsonl.
    """
    from mindspeed_mm.tasks import evaluate  # torch: the help does without

    result = evaluate.run(
        model,
        data,
        out=out,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        media_dir=media_dir,
        lora=lora,
        config=config,
    )
    if as_json:
        click.echo(json.dumps(result.to_dict(), ensure_ascii=False))
        return
    if result.facts["cut_off"]:
        click.echo(f"{result.facts['cut_off']} answers were cut off at {max_new_tokens} tokens (--max-new-tokens)")
    for line in result.lines():
        click.echo(line)
