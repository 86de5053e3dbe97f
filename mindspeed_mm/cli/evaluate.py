"""The command `mm evaluate`: scores a model on held-out rows, on a published set, or through a harness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from mindspeed_mm.cli.sharing import (
    Options,
    check_inputs,
    chosen,
    given_of,
    is_address,
    is_given,
    of_checkpoint,
    share,
    speaks,
)
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.garbage import collecting_later
from mindspeed_mm.core.terminal import say, say_json

if TYPE_CHECKING:
    from mindspeed_mm.tasks.evaluate.harness.served import ServedModel
    from mindspeed_mm.tasks.evaluate.judge import Judge

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
  mm evaluate runs/vqa --harness lmms-eval --tasks ai2d,mmmu_val --harness-python envs/lmms/bin/python
  mm evaluate http://127.0.0.1:8000/v1 --harness vlmevalkit --tasks AI2D_TEST
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
JUDGED = ("mmbench_dev", "mathvista_testmini")
"""Sets whose authors let a language model find answers."""
HARNESS_NAMES = ("lmms-eval", "vlmevalkit")
QUESTIONS_AT_A_TIME, MAX_NEW_TOKENS = 64, 512


@click.command(epilog=EXAMPLES)
@click.argument("model")
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
    help="Folder of another model's results on the same rows, or the same set, to compare with by a paired test.",
)
@click.option(
    "--generated",
    is_flag=True,
    help="MODEL is a folder of generated pictures and clips: measure them against --reference, and by --clip.",
)
@click.option(
    "--reference",
    type=click.Path(path_type=Path),
    help="With --generated: folder of real pictures or clips; PSNR and SSIM are of those with the same names.",
)
@click.option(
    "--clip",
    type=click.Path(path_type=Path),
    help="With --generated: folder of a CLIP model, for CLIP scores of the prompts and distances to the real pictures.",
)
@click.option(
    "--lpips",
    type=click.Path(path_type=Path),
    help="With --generated and --reference: file of torchvision's AlexNet, VGG-16 or SqueezeNet, for LPIPS of pairs.",
)
@click.option(
    "--dino",
    type=click.Path(path_type=Path),
    help="With --generated: folder of a DINO model, for the consistency of what clips show.",
)
@click.option(
    "--flow",
    type=click.Path(path_type=Path),
    help="With --generated: file of torchvision's raft_large, for the motion of clips.",
)
@click.option(
    "--vbench", metavar="A,B", help="With --generated: VBench dimensions to score clips on; VBench must be installed."
)
@click.option(
    "--vbench-python",
    type=click.Path(path_type=Path),
    help="With --vbench: the Python of the environment that it is installed in; default: this one.",
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
@click.option(
    "--harness",
    type=click.Choice(HARNESS_NAMES),
    help="Let this harness ask and score; it must be installed. MODEL is served for it, or is the address of a running "
    "server.",
)
@click.option("--tasks", metavar="A,B", help="With --harness: names of its tasks or sets, separated by commas.")
@click.option(
    "--harness-python",
    type=click.Path(path_type=Path),
    help="With --harness: the Python of the environment that it is installed in; default: this one.",
)
@click.option(
    "--harness-option",
    "harness_options",
    multiple=True,
    metavar="WORD",
    help="With --harness: an argument passed to its command line, such as --harness-option=--limit --harness-option=8.",
)
@click.option("--name", metavar="NAME", help="Name of a server's model to ask; default: the first one listed.")
@click.option("--key-file", type=click.Path(path_type=Path), help="With the address of a server: file with its key.")
@click.option("--loss", is_flag=True, help="Measure the cross-entropy and perplexity of the answers; generate nothing.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder for the results; default: eval inside the run folder, or eval/NAME for a model folder NAME.",
)
@click.option("--media-dir", type=click.Path(path_type=Path), help="Folder that media paths in --data are relative to.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help="Number of rows at a time; default: 64, or 8 with --loss, or 32 with --generated or --harness.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    help="Maximum length of an answer in tokens; default: 512, or the harness's own.",
)
@click.option(
    "--metric",
    type=click.Choice(["exact", "wer", "cer"]),
    help="How answers are compared: exact, whether each is the expected one (the default); wer or cer, the share of "
    "words or characters that are wrong.",
)
@click.option("--ignore-case", is_flag=True, help="Ignore upper and lower case when answers are compared.")
@click.option("--ignore-punctuation", is_flag=True, help="Ignore punctuation when answers are compared.")
@click.option(
    "--judge",
    metavar="URL",
    help="Address of a server of OpenAI's interface, up to /v1: a model there decides whether an answer that is not "
    "the expected one means the same; with --benchmark it finds the answer in what was said, of sets whose authors let "
    "a language model do so. Needs --judge-model.",
)
@click.option("--judge-model", metavar="NAME", help="With --judge: what the server calls the model.")
@click.option(
    "--judge-key-env",
    metavar="VARIABLE",
    help="With --judge: environment variable that holds the server's API key; default: no key is sent.",
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
@of_checkpoint
@click.pass_context
def command(context: click.Context, /, model: str, **options: Any) -> int:
    """Score MODEL, a Hugging Face folder or a run, on rows whose answers are known.

    Every question is answered by greedy generation; an answer counts when it is the expected one, character for
    character (white space aside), or by its words or characters with --metric. Writes results.json and samples.jsonl.

    With --loss the mean cross-entropy of the answers' tokens is measured instead, and its exponential, the perplexity:
    rows are encoded as in training, and every answer of a conversation counts. Writes loss.json and loss_rows.jsonl.

    With --benchmark the questions are those of a published set, and its authors' rule says what is right.

    With --generated, MODEL is a folder of pictures that a generator made. Writes generated.json.

    With --harness, lmms-eval or VLMEvalKit asks the questions and scores the answers. Writes harness.json.
    """
    way = next((name for name in ("generated", "harness", "benchmark", "loss") if options[name]), "rows")
    _check_options(context, way)
    _check_judge(options)
    if is_address(model) and way != "harness":
        way_out = "Add --harness, or name a folder or a run."
        raise UsageError("is the address of a server, whose model only a harness asks", where=model, way_out=way_out)
    if way != "harness":  # a server refuses options of a model, whatever they name
        check_inputs(context)
    _check_names(options, way)
    action, shares = _WAYS[way]
    return share(context, "evaluate", lambda: _tell(action(model, options), options["as_json"]), shares=shares)


_ASKING = ("tasks", "harness_python", "harness_options", "name", "key_file")
_OF_HARNESS = ("harness", "is for a harness", "Name one: --harness lmms-eval or vlmevalkit.")
_OF_GENERATED = ("generated", "measures generated pictures and clips", "Add --generated.")
_MEASURES = ("reference", "clip", "lpips", "dino", "flow", "vbench", "vbench_python", "features", "reference_features")
_OWN = {
    **dict.fromkeys(_MEASURES, _OF_GENERATED),
    **dict.fromkeys(_ASKING, _OF_HARNESS),
}
"""Option → the only way that takes it, what it does there, how to get there."""
_JUDGE = {"judge", "judge_model", "judge_key_env"}
_COMPARED = {"metric", "ignore_case", "ignore_punctuation"} | _JUDGE
_MODEL, _GENERATING = {"data", "lora", "config", "checkpoint"}, {"max_new_tokens", "plan", "nproc"}
_TAKEN = {
    "generated": set(_MEASURES),
    "harness": {"lora", "config", "checkpoint", *_ASKING} | _GENERATING,
    "benchmark": {"against", *_JUDGE} | _MODEL | _GENERATING,
    "loss": {"media_dir"} | _MODEL,
    "rows": {"media_dir", "against"} | _MODEL | _GENERATING | _COMPARED,
}
"""Way → its options, beside those of all."""
_WHY_NOT = {
    "harness": "does not go with --harness, whose tasks decide it",
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
    for name in given:
        if name not in taken:
            raise UsageError(_WHY_NOT[way], key=given[name], way_out="Leave it out.")
    if context.params["data"] is None and way == "benchmark":
        raise UsageError("the set's folder is not given", key="--data", way_out="Name it: --data sets/DocVQA.")
    if context.params["data"] is None and way == "rows":
        raise UsageError("no rows are given", key="--data", way_out="Name a file of rows: --data test.jsonl.")


def _check_judge(options: Options) -> None:
    """Raise `UsageError` unless a judge has an address and a name, and decides what is right or wrong."""
    for name in ("judge_model", "judge_key_env"):
        if options[name] is not None and options["judge"] is None:
            key = f"--{name.replace('_', '-')}"
            raise UsageError("there is no judge", key=key, way_out="Give its address: --judge URL.")
    if options["judge"] is None:
        return
    if options["benchmark"] not in (None, *JUDGED):
        what = f"the authors of {options['benchmark']} score by their rule alone"
        raise UsageError(what, key="--judge", way_out=f"Leave it out: those of {' and '.join(JUDGED)} ask a model.")
    if options["judge_model"] is None:
        way_out = "Name the model that the server is to ask: --judge-model NAME."
        raise UsageError("the judge has no name", key="--judge", way_out=way_out)
    if options["metric"] not in (None, "exact"):
        way_out = "Leave --metric out."
        raise UsageError("a judge says right or wrong, and counts no words", key="--judge", way_out=way_out)


def _check_names(options: Options, way: str) -> None:
    """Raise `UsageError` where another package is to be asked for nothing."""
    if way == "harness" and not names_of(options["tasks"]):
        raise UsageError("no tasks are given", key="--tasks", way_out="Name them as the harness does: --tasks ai2d.")
    wants_vbench = options["vbench"] is not None or options["vbench_python"] is not None
    if wants_vbench and not names_of(options["vbench"]):
        way_out = "Name them as VBench does: --vbench subject_consistency,motion_smoothness."
        raise UsageError("no dimensions are given", key="--vbench", way_out=way_out)


class Result(Protocol):
    """What every way of measuring returns."""

    def to_dict(self) -> dict[str, object]:
        """Return the result as JSON values, for `--json`."""

    def lines(self) -> list[str]:
        """Return the lines that are printed where `--json` is not given."""


def _tell(result: Result, as_json: bool) -> None:
    if speaks():
        if as_json:
            say_json(result.to_dict())
        else:
            for line in result.lines():
                say(line)


@collecting_later()
def _score_rows(model: str, options: Options) -> Result:
    from mindspeed_mm.fsdp.sampling.answers.scoring import Comparison  # torch: the help does without
    from mindspeed_mm.tasks.evaluate import evaluate

    comparison = Comparison(options["metric"] or "exact", options["ignore_case"], options["ignore_punctuation"])
    taken = chosen(options, "out", "media_dir", "lora", "config", "plan", "against")
    taken |= {"comparison": comparison, "judge": _judge(options)}
    return evaluate.run(Path(model), options["data"], **taken, **_limits(options))


def _judge(options: Options) -> Judge | None:
    """The judge that is to be asked; None: nobody."""
    from mindspeed_mm.tasks.evaluate.judge import Judge

    if options["judge"] is None:
        return None
    return Judge(options["judge"], options["judge_model"], options["judge_key_env"])


@collecting_later()
def _score_published(model: str, options: Options) -> Result:
    from mindspeed_mm.tasks.evaluate.published import evaluate  # torch: the help does without

    taken = chosen(options, "benchmark", "data", "out", "lora", "config", "against", "plan")
    return evaluate.run(evaluate.PublishedRequest(Path(model), judge=_judge(options), **taken, **_limits(options)))


def _limits(options: Options) -> Options:
    return {
        "batch_size": options["batch_size"] or QUESTIONS_AT_A_TIME,
        "max_new_tokens": options["max_new_tokens"] or MAX_NEW_TOKENS,
    }


def _measure_loss(model: str, options: Options) -> Result:
    from mindspeed_mm.tasks.evaluate import loss  # torch: the help does without

    request = loss.LossEvaluationRequest(
        Path(model),
        options["data"],
        options["media_dir"],
        options["batch_size"] or loss.BATCH_SIZE,
        **chosen(options, "lora", "config"),
    )
    return loss.run(request, options["out"])


def _measure_generated(model: str, options: Options) -> Result:
    given = given_of(options, *_MEASURES, "out", "batch_size")
    if {"vbench", "vbench_python"} & given.keys():
        given["vbench"] = names_of(options["vbench"])
    from mindspeed_mm.tasks.evaluate.generated import evaluate  # torch: the help does without

    return evaluate.run(evaluate.GeneratedRequest(Path(model), **given))


def names_of(text: str | None) -> list[str]:
    """Names that stand in one option, separated by commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _ask_by_harness(model: str, options: Options) -> Result:
    from mindspeed_mm.tasks.evaluate.folder import results_folder
    from mindspeed_mm.tasks.evaluate.harness import evaluate, served  # torch: the help does without
    from mindspeed_mm.tasks.model_source import resolve_model

    tasks = names_of(options["tasks"])
    asked: served.ServedModel | served.Folder
    if is_address(model):
        asked = _running(model, options)
        place = results_folder(None, Path(asked.name))
    else:
        _refuse_given(options, ("name", "key_file"), "is for the address of a server")
        asked = served.Folder(
            Path(model),
            batch_size=options["batch_size"] or served.BATCH_SIZE,
            **chosen(options, "lora", "config", "plan", "nproc"),
        )
        source = resolve_model(asked.model)
        place = results_folder(source.run, source.folder)
    return evaluate.run(
        evaluate.HarnessRequest(
            asked,
            options["harness"],
            tasks,
            options["out"] or place / options["harness"],
            options["harness_python"],
            options["max_new_tokens"],
            options["harness_options"],
        )
    )


def _running(address: str, options: Options) -> ServedModel:
    """The model of a server that runs already."""
    from mindspeed_mm.cli.serve import read_key

    others = ("lora", "config", "plan", "batch_size")
    _refuse_given(options, others, "is for models that are loaded here, and a server has loaded its own")
    key = read_key(options["key_file"])
    from mindspeed_mm.tasks.answer.remote import RemoteModel  # torch: the help does without
    from mindspeed_mm.tasks.evaluate.harness.served import ServedModel

    server = RemoteModel.at(address, options["name"] or "", key)
    return ServedModel(server.address, server.name, key)


def _refuse_given(options: Options, names: Sequence[str], what: str) -> None:
    for name in names:
        if options[name] is not None:
            raise UsageError(what, key=f"--{name.replace('_', '-')}", way_out="Leave it out.")


_WAYS: dict[str, tuple[Callable[[str, Options], Result], bool]] = {
    "generated": (_measure_generated, False),
    "harness": (_ask_by_harness, False),
    "benchmark": (_score_published, True),
    "loss": (_measure_loss, False),
    "rows": (_score_rows, True),
}
"""Way → what measures so, and whether processes share it."""
