"""`mm evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from mindspeed_mm.core.errors import UsageError

EXAMPLES = """
\b
Examples:
  mm evaluate runs/digits/run --data runs/digits/data/test.jsonl
  mm evaluate runs/digits/hf --data test.jsonl --out scores --batch-size 128 --max-new-tokens 16
  mm evaluate runs/digits/run --data runs/digits/data/test.jsonl --loss
  mm evaluate runs/asr --data spoken.jsonl --metric wer --ignore-case --ignore-punctuation
  mm evaluate runs/vqa --benchmark docvqa_val --data sets/DocVQA
  mm evaluate runs/vqa --benchmark mmbench_dev --data MMBench_DEV_EN.tsv --against runs/older/eval/mmbench_dev
  mm evaluate samples --generated --reference real --clip models/clip-vit-large-patch14
"""

BENCHMARKS = (
    "ai2d_test",
    "mmmu_dev_val",
    "chartqa_test",
    "docvqa_val",
    "textvqa_val",
    "mmbench_dev",
    "mathvista_testmini",
    "ocrbench",
    "realworldqa",
    "videomme",
)
QUESTIONS_AT_A_TIME, MAX_NEW_TOKENS = 64, 512


@click.command(epilog=EXAMPLES)
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Rows with questions and answers, or a folder of speech as LibriSpeech has it. Can be left out with --loss: "
    "the run's own validation rows are then used.",
)
@click.option(
    "--benchmark",
    type=click.Choice(BENCHMARKS),
    help="A published set. --data then names its folder or file, as its authors give it out; their rule scores the "
    "answers.",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    help="With --benchmark: folder of another model's results on the same set, to compare with by a paired test.",
)
@click.option(
    "--generated",
    is_flag=True,
    help="MODEL is a folder of generated pictures: measure them against --reference, and by --clip.",
)
@click.option(
    "--reference",
    type=click.Path(path_type=Path),
    help="With --generated: folder of real pictures; PSNR and SSIM are of those with the same names.",
)
@click.option(
    "--clip",
    type=click.Path(path_type=Path),
    help="With --generated: folder of a CLIP model, for CLIP scores of the prompts and distances to the real pictures.",
)
@click.option("--loss", is_flag=True, help="Measure the cross-entropy and perplexity of the answers; generate nothing.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder for the results; default: eval, inside the run folder if there is one.",
)
@click.option("--media-dir", type=click.Path(path_type=Path), help="Folder that media paths in --data are relative to.")
@click.option(
    "--batch-size", type=click.IntRange(min=1), help="Number of rows at a time; default: 64, or 8 with --loss."
)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), help="Maximum length of an answer in tokens; default: 512."
)
@click.option(
    "--metric",
    type=click.Choice(["exact", "wer", "cer"]),
    help="How answers are compared: exact, whether each is the expected one (the default); wer or cer, the share of "
    "words or characters that are wrong.",
)
@click.option("--ignore-case", is_flag=True, help="Small and capital letters are the same.")
@click.option("--ignore-punctuation", is_flag=True, help="Punctuation does not count.")
@click.option("--lora", type=click.Path(path_type=Path), help="Folder of adapters to apply to the weights.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="YAML whose data section describes the rows and how they are presented; default: the run's.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(
    model: Path,
    data: Path | None,
    benchmark: str | None,
    against: Path | None,
    generated: bool,
    reference: Path | None,
    clip: Path | None,
    loss: bool,
    out: Path | None,
    media_dir: Path | None,
    batch_size: int | None,
    max_new_tokens: int | None,
    metric: Literal["exact", "wer", "cer"] | None,
    ignore_case: bool,
    ignore_punctuation: bool,
    lora: Path | None,
    config: Path | None,
    as_json: bool,
) -> None:
    """Score MODEL, a Hugging Face folder or a run, on rows whose answers are known.

    Every question is answered by greedy generation; an answer counts when it is the expected one, character for
    character (white space aside), or by its words or characters with --metric. Writes results.json and samples.jsonl.

    With --loss the mean cross-entropy of the answers' tokens is measured instead, and its exponential, the perplexity:
    rows are encoded as in training, and every answer of a conversation counts. Writes loss.json and loss_rows.jsonl.

    With --benchmark the questions are those of a published set, and its authors' rule says what is right.

    With --generated, MODEL is a folder of pictures that a generator made. Writes generated.json.
    """
    if generated or reference is not None or clip is not None:
        _measure_generated(
            {"folder": model, "reference": reference, "clip": clip, "out": out, "batch_size": batch_size}
        )
        return
    own = {"--metric": metric, "--ignore-case": ignore_case or None, "--ignore-punctuation": ignore_punctuation or None}
    if benchmark is None and against is not None:
        raise UsageError("compares results of --benchmark", key="--against", way_out="Name the set: --benchmark NAME.")
    if benchmark is not None:
        unused = {"--loss": loss or None, "--media-dir": media_dir, **own}
        _refuse_given(unused, "does not go with --benchmark, whose set decides it")
        if data is None:
            raise UsageError("the set's folder is not given", key="--data", way_out="Name it: --data sets/DocVQA.")
        limits = {"batch_size": batch_size or QUESTIONS_AT_A_TIME, "max_new_tokens": max_new_tokens or MAX_NEW_TOKENS}
        _score_published(
            {"model": model, "benchmark": benchmark, "data": data, "out": out, "lora": lora, "config": config}
            | {"against": against, **limits},
            as_json,
        )
        return
    if loss:
        _refuse_given({"--max-new-tokens": max_new_tokens, **own}, "nothing is generated with --loss")
        _measure_loss(model, data, media_dir, batch_size, lora, config, out, as_json)
        return
    if data is None:
        raise UsageError("no rows are given", key="--data", way_out="Name a file of rows: --data test.jsonl.")
    from mindspeed_mm.fsdp.sampling.answers.scoring import Comparison  # torch: the help does without
    from mindspeed_mm.tasks.evaluate import evaluate

    result = evaluate.run(
        model,
        data,
        out=out,
        batch_size=batch_size or QUESTIONS_AT_A_TIME,
        max_new_tokens=max_new_tokens or MAX_NEW_TOKENS,
        media_dir=media_dir,
        lora=lora,
        config=config,
        comparison=Comparison(metric or "exact", ignore_case, ignore_punctuation),
    )
    if as_json:
        click.echo(json.dumps(result.to_dict(), ensure_ascii=False))
        return
    if result.facts["cut_off"]:
        limit = max_new_tokens or MAX_NEW_TOKENS
        click.echo(f"{result.facts['cut_off']} answers were cut off at {limit} tokens (--max-new-tokens)")
    for line in result.lines():
        click.echo(line)


def _refuse_given(options: dict[str, Any], what: str) -> None:
    """Raise for the first of these options that has a value."""
    for key in (key for key, value in options.items() if value is not None):
        raise UsageError(what, key=key, way_out="Leave it out.")


def _score_published(asked: dict[str, Any], as_json: bool) -> None:
    from mindspeed_mm.tasks.evaluate.published import evaluate  # torch: the help does without

    result = evaluate.run(evaluate.PublishedRequest(**asked))
    if as_json:
        click.echo(json.dumps(result.to_dict(), ensure_ascii=False))
        return
    for line in result.lines():
        click.echo(line)


def _measure_loss(
    model: Path,
    data: Path | None,
    media_dir: Path | None,
    batch_size: int | None,
    lora: Path | None,
    config: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    from mindspeed_mm.tasks.evaluate import loss as evaluate_loss

    request = evaluate_loss.LossEvaluationRequest(
        model, data, media_dir, batch_size or evaluate_loss.BATCH_SIZE, lora=lora, config=config
    )
    result = evaluate_loss.run(request, out)
    if as_json:
        click.echo(json.dumps(result.to_dict(), ensure_ascii=False))
        return
    for line in result.lines():
        click.echo(line)


def _measure_generated(asked: dict[str, Any]) -> None:
    context = click.get_current_context()
    taken = {"model", "generated", "reference", "clip", "out", "batch_size", "as_json"}
    for name in context.params:
        if name not in taken and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            key = f"--{name.replace('_', '-')}"
            raise UsageError("does not go with --generated, which asks no questions", key=key, way_out="Leave it out.")
    if not context.params["generated"]:
        key = "--reference" if asked["reference"] is not None else "--clip"
        raise UsageError("measures generated pictures", key=key, way_out="Add --generated.")
    from mindspeed_mm.tasks.evaluate.generated import evaluate  # torch: the help does without

    request = {name: value for name, value in asked.items() if value is not None}
    result = evaluate.run(evaluate.GeneratedRequest(**request))
    for line in [json.dumps(result, ensure_ascii=False)] if context.params["as_json"] else evaluate.lines(result):
        click.echo(line)
