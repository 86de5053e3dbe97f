"""`mm evaluate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import click

from mindspeed_mm.cli.sharing import is_given, share, speaks
from mindspeed_mm.core.errors import UsageError

EXAMPLES = """
\b
Examples:
  mm evaluate runs/digits/run --data runs/digits/data/test.jsonl
  mm evaluate runs/digits/hf --data test.jsonl --out scores --batch-size 128 --max-new-tokens 16
  mm evaluate runs/digits/run --data runs/digits/data/test.jsonl --loss
  mm evaluate runs/asr --data spoken.jsonl --metric wer --ignore-case --ignore-punctuation
  mm evaluate runs/vqa --data open.jsonl --judge http://127.0.0.1:8000/v1 --judge-model large
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
@click.option(
    "--features",
    type=click.Path(path_type=Path),
    help="With --generated: .npy file of features of the pictures, of any model; needs --reference-features.",
)
@click.option(
    "--reference-features",
    type=click.Path(path_type=Path),
    help="With --generated: .npy file of the same features of real pictures; with Inception's, the distances are FID "
    "and KID.",
)
@click.option("--loss", is_flag=True, help="Measure the cross-entropy and perplexity of the answers; generate nothing.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder for the results; default: eval inside the run folder, or eval/NAME for a model folder NAME.",
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
@click.option(
    "--judge",
    metavar="URL",
    help="Address of a server of OpenAI's interface, up to /v1: a model there decides whether an answer that is not "
    "the expected one means the same. Needs --judge-model.",
)
@click.option("--judge-model", metavar="NAME", help="With --judge: what the server calls the model.")
@click.option(
    "--judge-key-env",
    metavar="VARIABLE",
    help="With --judge: environment variable that holds the server's key; by default none is sent.",
)
@click.option("--lora", type=click.Path(path_type=Path), help="Folder of adapters to apply to the weights.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="YAML whose data section describes the rows and how they are presented; default: the run's.",
)
@click.option(
    "--plan",
    type=click.Path(path_type=Path),
    help="YAML whose 'parallel' section spreads a model that is too large for one device over the processes, which "
    "then answer each question together.",
)
@click.option(
    "--nproc", type=click.IntRange(min=1), default=1, help="Number of processes on this host; they share the questions."
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.pass_context
def command(context: click.Context, /, model: Path, **options: Any) -> int:
    """Score MODEL, a Hugging Face folder or a run, on rows whose answers are known.

    Every question is answered by greedy generation; an answer counts when it is the expected one, character for
    character (white space aside), or by its words or characters with --metric. Writes results.json and samples.jsonl.

    With --loss the mean cross-entropy of the answers' tokens is measured instead, and its exponential, the perplexity:
    rows are encoded as in training, and every answer of a conversation counts. Writes loss.json and loss_rows.jsonl.

    With --benchmark the questions are those of a published set, and its authors' rule says what is right.

    With --generated, MODEL is a folder of pictures that a generator made. Writes generated.json.
    """
    way = next((name for name in ("generated", "benchmark", "loss") if options[name]), "rows")
    _check_options(context, way)
    _check_judge(options)
    action, shares = _WAYS[way]
    return share(context, "evaluate", lambda: _tell(action(model, options), options["as_json"]), shares=shares)


_OWN = {
    "reference": ("generated", "measures generated pictures", "Add --generated."),
    "clip": ("generated", "measures generated pictures", "Add --generated."),
    "features": ("generated", "measures generated pictures", "Add --generated."),
    "reference_features": ("generated", "measures generated pictures", "Add --generated."),
    "against": ("benchmark", "compares results of --benchmark", "Name the set: --benchmark NAME."),
}
"""Option → the only way that takes it, what it does there, how to get there."""
_COMPARED = {"metric", "ignore_case", "ignore_punctuation", "judge", "judge_model", "judge_key_env"}
_MODEL, _GENERATING = {"data", "lora", "config"}, {"max_new_tokens", "plan", "nproc"}
_TAKEN = {
    "generated": {"reference", "clip", "features", "reference_features"},
    "benchmark": {"against"} | _MODEL | _GENERATING,
    "loss": {"media_dir"} | _MODEL,
    "rows": {"media_dir"} | _MODEL | _GENERATING | _COMPARED,
}
"""Way → its options, beside those of all."""
_WHY_NOT = {
    "generated": "does not go with --generated, which asks no questions",
    "benchmark": "does not go with --benchmark, whose set decides it",
    "loss": "nothing is generated with --loss",
}


def _check_options(context: click.Context, way: str) -> None:
    """Raise `UsageError` for the first option that this way of measuring has no use for, or that it lacks."""
    given = {option.name or "": option.opts[0] for option in context.command.params if is_given(context, option)}
    for name, (owner, what, way_out) in _OWN.items():
        if name in given and owner != way:
            raise UsageError(what, key=given[name], way_out=way_out)
    taken = {"model", way, "out", "batch_size", "as_json", *_TAKEN[way]}
    for name in (name for name in given if name not in taken):
        raise UsageError(_WHY_NOT[way], key=given[name], way_out="Leave it out.")
    if context.params["data"] is None and way == "benchmark":
        raise UsageError("the set's folder is not given", key="--data", way_out="Name it: --data sets/DocVQA.")
    if context.params["data"] is None and way == "rows":
        raise UsageError("no rows are given", key="--data", way_out="Name a file of rows: --data test.jsonl.")


def _check_judge(options: dict[str, Any]) -> None:
    """Raise `UsageError` unless a judge has an address and a name, and decides what is right or wrong."""
    for name in ("judge_model", "judge_key_env"):
        if options[name] is not None and options["judge"] is None:
            key = f"--{name.replace('_', '-')}"
            raise UsageError("there is no judge", key=key, way_out="Give its address: --judge URL.")
    if options["judge"] is None:
        return
    if options["judge_model"] is None:
        way_out = "Name the model that the server is to ask: --judge-model NAME."
        raise UsageError("the judge has no name", key="--judge", way_out=way_out)
    if options["metric"] not in (None, "exact"):
        way_out = "Leave --metric out."
        raise UsageError("a judge says right or wrong, and counts no words", key="--judge", way_out=way_out)


class Result(Protocol):
    """What every way of measuring returns."""

    def to_dict(self) -> dict[str, Any]:
        """For machines."""

    def lines(self) -> list[str]:
        """For people."""


def _tell(result: Result, as_json: bool) -> None:
    if speaks():
        for line in [json.dumps(result.to_dict(), ensure_ascii=False)] if as_json else result.lines():
            click.echo(line)


def _score_rows(model: Path, options: dict[str, Any]) -> Result:
    from mindspeed_mm.fsdp.sampling.answers.scoring import Comparison  # torch: the help does without
    from mindspeed_mm.tasks.evaluate import evaluate
    from mindspeed_mm.tasks.evaluate.judge import Judge

    judge = None
    if options["judge"] is not None:
        judge = Judge(options["judge"], options["judge_model"], options["judge_key_env"])
    comparison = Comparison(options["metric"] or "exact", options["ignore_case"], options["ignore_punctuation"])
    taken = {name: options[name] for name in ("out", "media_dir", "lora", "config", "plan")}
    return evaluate.run(model, options["data"], comparison=comparison, judge=judge, **taken, **_limits(options))


def _score_published(model: Path, options: dict[str, Any]) -> Result:
    from mindspeed_mm.tasks.evaluate.published import evaluate  # torch: the help does without

    taken = {name: options[name] for name in ("benchmark", "data", "out", "lora", "config", "against", "plan")}
    return evaluate.run(evaluate.PublishedRequest(model, **taken, **_limits(options)))


def _limits(options: dict[str, Any]) -> dict[str, Any]:
    return {
        "batch_size": options["batch_size"] or QUESTIONS_AT_A_TIME,
        "max_new_tokens": options["max_new_tokens"] or MAX_NEW_TOKENS,
    }


def _measure_loss(model: Path, options: dict[str, Any]) -> Result:
    from mindspeed_mm.tasks.evaluate import loss  # torch: the help does without

    taken = {name: options[name] for name in ("lora", "config")}
    size = options["batch_size"] or loss.BATCH_SIZE
    return loss.run(
        loss.LossEvaluationRequest(model, options["data"], options["media_dir"], size, **taken), options["out"]
    )


def _measure_generated(model: Path, options: dict[str, Any]) -> Result:
    from mindspeed_mm.tasks.evaluate.generated import evaluate  # torch: the help does without

    names = ("reference", "clip", "features", "reference_features", "out", "batch_size")
    return evaluate.run(evaluate.GeneratedRequest(model, **{n: options[n] for n in names if options[n] is not None}))


_WAYS: dict[str, tuple[Callable[[Path, dict[str, Any]], Result], bool]] = {
    "generated": (_measure_generated, False),
    "benchmark": (_score_published, True),
    "loss": (_measure_loss, False),
    "rows": (_score_rows, True),
}
"""Way → what measures so, and whether processes share it."""
