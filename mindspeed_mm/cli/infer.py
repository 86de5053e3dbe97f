"""`mm infer`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from mindspeed_mm.core.errors import UsageError

EXAMPLES = """
\b
Examples:
  mm infer runs/digits/hf --image three.png --prompt "Which digit is this?"
  mm infer runs/digits/run --data questions.jsonl --out answers.jsonl
"""


@click.command(epilog=EXAMPLES)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--prompt", help="What to ask.")
@click.option("--image", "images", type=click.Path(path_type=Path), multiple=True, help="A picture; may be repeated.")
@click.option("--data", type=click.Path(path_type=Path), help="Rows to answer: conversations, or prompt and image.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the answers to --data go, as JSON lines.")
@click.option("--media-dir", type=click.Path(path_type=Path), help="Where relative media paths of --data start.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="Questions at a time.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Longest answer.")
@click.option("--overwrite", is_flag=True, help="Forget the answers that --out holds already.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer, or how it went, as JSON.")
def command(
    model: Path,
    prompt: str | None,
    images: tuple[Path, ...],
    data: Path | None,
    out: Path | None,
    media_dir: Path | None,
    batch_size: int,
    max_new_tokens: int,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Let MODEL, a Hugging Face folder or a run, answer a prompt about pictures, or every row of a file.

    A file of answers that exists is continued: rows that are answered already are not asked again.
    """
    if (prompt is None) == (data is None):
        raise UsageError("give either --prompt or --data", way_out="See mm infer --help.")
    if data is not None and out is None:
        raise UsageError("--data needs --out", key="--out", way_out="Name the file for the answers.")
    if data is not None and images:
        raise UsageError(
            "--image goes with --prompt", key="--image", way_out="Name the pictures in the rows of --data."
        )
    from mindspeed_mm.tasks import infer  # torch: the help does without

    if prompt is not None:
        answer = infer.answer_prompt(model, prompt, images, max_new_tokens=max_new_tokens)
        click.echo(json.dumps(asdict(answer), ensure_ascii=False) if as_json else answer.text)
        return
    assert data is not None and out is not None
    outcome = infer.run(
        model,
        data,
        out,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        media_dir=media_dir,
        overwrite=overwrite,
    )
    if as_json:
        click.echo(json.dumps(asdict(outcome), default=str))
        return
    kept = f", {outcome.kept} were there already" if outcome.kept else ""
    click.echo(f"{outcome.out}: {outcome.answered} answered{kept}")
    if outcome.cut_off:
        click.echo(f"{outcome.cut_off} answers were cut off at {max_new_tokens} tokens (--max-new-tokens)", err=True)
