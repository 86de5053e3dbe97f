"""The command `mm evaluate`: scores a model on held-out rows, on a published set, or through a harness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import click

from mindspeed_mm.cli.requests import given_names, takes
from mindspeed_mm.cli.sharing import check_inputs, import_plugins, share, speaks
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.garbage import collecting_later
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest, Way
from mindspeed_mm.tasks.requests.shared import is_address

EXAMPLES = """
\b
Examples:
  mm evaluate runs/digits/run --data runs/digits/data/test.jsonl
  mm evaluate runs/digits/hf --data test.jsonl --out scores --batch-size 128 --max-new-tokens 16
  mm evaluate runs/digits/run --data runs/digits/data/test.jsonl --loss
  mm evaluate runs/asr --data spoken.jsonl --metric wer --ignore-case --ignore-punctuation
  mm evaluate models/Qwen3-TTS-12Hz-1.7B-Base --data texts.jsonl --recogniser models/whisper-small --ignore-case
  mm evaluate runs/vqa --data open.jsonl --judge http://127.0.0.1:8000/v1 --judge-model large
  mm evaluate runs/vqa --benchmark docvqa_val --data sets/DocVQA
  mm evaluate runs/vqa --benchmark mmbench_dev --data MMBench_DEV_EN.tsv --against runs/older/eval/mmbench_dev
  mm evaluate samples --generated --reference real --clip models/clip-vit-large-patch14
  mm evaluate runs/vqa --harness lmms-eval --tasks ai2d,mmmu_val --harness-python envs/lmms/bin/python
  mm evaluate http://127.0.0.1:8000/v1 --harness vlmevalkit --tasks AI2D_TEST
"""


@click.command(epilog=EXAMPLES)
@takes(EvaluateRequest)
def command(request: EvaluateRequest) -> int:
    """Score MODEL, a Hugging Face folder or a run, on rows whose answers are known.

    Every question is answered by greedy generation; an answer counts when it is the expected one, character for
    character (white space aside), or by its words or characters with --metric. Writes results.json and samples.jsonl.

    With --loss the mean cross-entropy of the answers' tokens is measured instead, and its exponential, the perplexity:
    rows are encoded as in training, and every answer of a conversation counts. Writes loss.json and loss_rows.jsonl.

    With --recogniser MODEL speaks: it says the texts of the rows, and the share of words is counted that a speech
    recogniser hears wrongly.

    With --benchmark the questions are those of a published set, and its authors' rule says what is right.

    With --generated, MODEL is a folder of pictures that a generator made. Writes generated.json.

    With --harness, lmms-eval or VLMEvalKit asks the questions and scores the answers. Writes harness.json.
    """
    request.check(given_names())
    if is_address(request.model) and request.way != "harness":
        way_out = "Add --harness, or name a folder or a run."
        raise UsageError(
            "is the address of a server, whose model only a harness asks", where=request.model, way_out=way_out
        )
    if request.way != "harness":  # a server refuses options of a model, whatever they name
        check_inputs(request)
    request.check_names()
    import_plugins(request.plugins)
    action, shares = _WAYS[request.way]
    return share("evaluate", request, lambda: _tell(action(request), request.as_json), shares=shares)


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
def _score_rows(request: EvaluateRequest) -> Result:
    from mindspeed_mm.tasks.evaluate import evaluate  # torch: the help does without

    return evaluate.run(request)


@collecting_later()
def _score_published(request: EvaluateRequest) -> Result:
    from mindspeed_mm.tasks.evaluate.published import evaluate  # torch: the help does without

    return evaluate.run(request)


@collecting_later()
def _score_speech(request: EvaluateRequest) -> Result:
    from mindspeed_mm.tasks.evaluate import spoken  # torch: the help does without

    return spoken.run(request)


def _measure_loss(request: EvaluateRequest) -> Result:
    from mindspeed_mm.tasks.evaluate import loss  # torch: the help does without

    return loss.run(request)


def _measure_generated(request: EvaluateRequest) -> Result:
    from mindspeed_mm.tasks.evaluate.generated import evaluate  # torch: the help does without

    return evaluate.run(request)


def _ask_by_harness(request: EvaluateRequest) -> Result:
    from mindspeed_mm.tasks.evaluate.harness import evaluate  # torch: the help does without

    return evaluate.run(request)


_WAYS: dict[Way, tuple[Callable[[EvaluateRequest], Result], bool]] = {
    "generated": (_measure_generated, False),
    "harness": (_ask_by_harness, False),
    "benchmark": (_score_published, True),
    "loss": (_measure_loss, False),
    "recogniser": (_score_speech, False),
    "rows": (_score_rows, True),
}
"""Way → what measures so, and whether processes share it."""
