"""What `mm evaluate` is asked: rows, a published set, a harness, the loss of known answers, or generated samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.request import Request, argument, fields_of, option
from mindspeed_mm.tasks.requests.shared import checkpoint_option, plugin_option

JUDGED = ("mmbench_dev", "mathvista_testmini")
"""Sets whose authors let a language model find answers."""
QUESTIONS_AT_A_TIME, LOSS_ROWS_AT_A_TIME, FRAMES_AT_A_TIME, MAX_NEW_TOKENS = 64, 8, 32, 512

Way = Literal["generated", "harness", "benchmark", "loss", "recogniser", "rows"]
"""How a model is measured, by the option that asks for it; `rows` where none does."""
Benchmark = Literal[
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
]
Harness = Literal["lmms-eval", "vlmevalkit"]
Metric = Literal["exact", "wer", "cer"]


@dataclass(frozen=True)
class EvaluateRequest(Request):
    """A model, or samples of one, and what they are measured by."""

    model: str = argument()
    data: Path | None = option(
        "Rows with questions and answers, or a folder of speech as LibriSpeech has it. Can be left out with --loss: "
        "the run's own validation rows are then used."
    )
    benchmark: Benchmark | None = option(
        "A published set. --data then names its folder or file, as its authors give it out; their rule scores the "
        "answers."
    )
    against: Path | None = option(
        "Folder of another model's results on the same rows, or the same set, to compare with by a paired test."
    )
    generated: bool = option(
        "MODEL is a folder of generated pictures and clips: measure them against --reference, and by --clip.", False
    )
    reference: Path | None = option(
        "With --generated: folder of real pictures or clips; PSNR and SSIM are of those with the same names."
    )
    clip: Path | None = option(
        "With --generated: folder of a CLIP model, for CLIP scores of the prompts and distances to the real pictures."
    )
    lpips: Path | None = option(
        "With --generated and --reference: file of torchvision's AlexNet, VGG-16 or SqueezeNet, for LPIPS of pairs."
    )
    dino: Path | None = option("With --generated: folder of a DINO model, for the consistency of what clips show.")
    flow: Path | None = option("With --generated: file of torchvision's raft_large, for the motion of clips.")
    vbench: str | None = option(
        "With --generated: VBench dimensions to score clips on; VBench must be installed.", metavar="A,B"
    )
    vbench_python: Path | None = option(
        "With --vbench: the Python of the environment that it is installed in; default: this one."
    )
    features: Path | None = option(
        "With --generated: .npy file of features of the pictures, of any model; needs --reference-features."
    )
    reference_features: Path | None = option(
        "With --generated: .npy file of the same features of real pictures; with Inception's, the distances are FID "
        "and KID."
    )
    recogniser: Path | None = option(
        "Folder or run of a speech recogniser. MODEL says the text of each row of --data, the recogniser writes down "
        "what it hears, and the words that differ are counted."
    )
    harness: Harness | None = option(
        "Let this harness ask and score; it must be installed. MODEL is served for it, or is the address of a running "
        "server."
    )
    tasks: str | None = option("With --harness: names of its tasks or sets, separated by commas.", metavar="A,B")
    harness_python: Path | None = option(
        "With --harness: the Python of the environment that it is installed in; default: this one."
    )
    harness_options: tuple[str, ...] = option(
        "With --harness: an argument passed to its command line, such as --harness-option=--limit --harness-option=8.",
        (),
        flag="--harness-option",
        metavar="WORD",
    )
    name: str | None = option("Name of a server's model to ask; default: the first one listed.", metavar="NAME")
    key_file: Path | None = option("With the address of a server: file with its key.")
    loss: bool = option("Measure the cross-entropy and perplexity of the answers; generate nothing.", False)
    out: Path | None = option(
        "Folder for the results; default: eval inside the run folder, or eval/NAME for a model folder NAME."
    )
    media_dir: Path | None = option("Folder that media paths in --data are relative to.")
    batch_size: int | None = option(
        "Number of rows at a time; default: 64, or 8 with --loss, or 32 with --generated or --harness.", least=1
    )
    max_new_tokens: int | None = option(
        "Maximum length of an answer in tokens; default: 512, or the harness's own; of speech as the model was "
        "released.",
        least=1,
    )
    metric: Metric | None = option(
        "How answers are compared: exact, whether each is the expected one (the default); wer or cer, the share of "
        "words or characters that are wrong; with --recogniser wer is the default."
    )
    ignore_case: bool = option("Ignore upper and lower case when answers are compared.", False)
    ignore_punctuation: bool = option("Ignore punctuation when answers are compared.", False)
    judge: str | None = option(
        "Address of a server of OpenAI's interface, up to /v1: a model there decides whether an answer that is not the "
        "expected one means the same; with --benchmark it finds the answer in what was said, of sets whose authors let "
        "a language model do so. Needs --judge-model.",
        metavar="URL",
    )
    judge_model: str | None = option("With --judge: what the server calls the model.", metavar="NAME")
    judge_key_env: str | None = option(
        "With --judge: environment variable that holds the server's API key; default: no key is sent.",
        metavar="VARIABLE",
    )
    lora: Path | None = option("Folder of adapters to apply to the weights.")
    config: Path | None = option(
        "YAML whose data section describes the rows and how they are presented; default: the run's."
    )
    plan: Path | None = option(
        "YAML whose 'parallel' section spreads a model that is too large for one device over the processes, which then "
        "answer each question together."
    )
    nproc: int = option("Number of processes on this host; they share the questions.", 1, least=1)
    as_json: bool = option("Print the results as JSON.", False, flag="--json")
    plugins: tuple[str, ...] = plugin_option()
    checkpoint: str | None = checkpoint_option()
    data_name: str | None = None
    """What the results call `data`; None: its path."""

    @property
    def way(self) -> Way:
        """How the model is measured."""
        ways: tuple[Way, ...] = ("generated", "harness", "benchmark", "loss", "recogniser")
        return next((way for way in ways if getattr(self, way)), "rows")

    @property
    def folder(self) -> Path:
        """The model's folder, a run, or the folder of generated samples."""
        return Path(self.model)

    @property
    def longest_answer(self) -> int:
        """Most tokens of an answer that is generated here."""
        return self.max_new_tokens or MAX_NEW_TOKENS

    @property
    def questions_at_a_time(self) -> int:
        """Number of questions that are answered together."""
        return self.batch_size or QUESTIONS_AT_A_TIME

    def check(self, given: Iterable[str]) -> None:
        """Check what is asked for, before torch is imported.

        Args:
            given: Names of the fields that were given.

        Raises:
            UsageError: An option is of no use for this way of measuring, or one is lacking.
        """
        _check_given(self, set(given))
        _check_judge(self)

    def check_names(self) -> None:
        """Raise `UsageError` where another package is to be asked for nothing."""
        if self.way == "harness" and not names_of(self.tasks):
            raise UsageError(
                "no tasks are given", key="--tasks", way_out="Name them as the harness does: --tasks ai2d."
            )
        if (self.vbench is not None or self.vbench_python is not None) and not names_of(self.vbench):
            way_out = "Name them as VBench does: --vbench subject_consistency,motion_smoothness."
            raise UsageError("no dimensions are given", key="--vbench", way_out=way_out)

    def refuse(self, names: Iterable[str], what: str) -> None:
        """Raise `UsageError` for the first of these fields that has a value."""
        for each in fields_of(type(self)):
            if each.name in names and getattr(self, each.name) is not None:
                raise UsageError(what, key=each.flag, way_out="Leave it out.")


def names_of(text: str | None) -> list[str]:
    """Names that stand in one option, separated by commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


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
_MODEL, _GENERATING = {"data", "lora", "config", "plugins", "checkpoint"}, {"max_new_tokens", "plan", "nproc"}
_TAKEN: dict[Way, set[str]] = {
    "generated": set(_MEASURES),
    "harness": {"lora", "config", "plugins", "checkpoint", *_ASKING} | _GENERATING,
    "benchmark": {"against", *_JUDGE} | _MODEL | _GENERATING,
    "loss": {"media_dir"} | _MODEL,
    "recogniser": {"media_dir", "against", "max_new_tokens", *_COMPARED} - _JUDGE | _MODEL - {"lora"},
    "rows": {"media_dir", "against"} | _MODEL | _GENERATING | _COMPARED,
}
"""Way → its options, beside those of all."""
_WHY_NOT: dict[str, str] = {
    "harness": "does not go with --harness, whose tasks decide it",
    "generated": "does not go with --generated, which asks no questions",
    "benchmark": "does not go with --benchmark, whose set decides it",
    "loss": "nothing is generated with --loss",
    "recogniser": "does not go with --recogniser",
}


def _check_given(request: EvaluateRequest, given: set[str]) -> None:
    """Raise `UsageError` for the first option that this way of measuring has no use for, or that it lacks."""
    way = request.way
    flags = {each.name: each.flag for each in fields_of(EvaluateRequest)}
    for name, (owner, what, way_out) in _OWN.items():
        if name in given and owner != way:
            raise UsageError(what, key=flags[name], way_out=way_out)
    taken = {"model", way, "out", "batch_size", "as_json", *_TAKEN[way]}
    for name, flag in flags.items():
        if name in given and name not in taken:
            raise UsageError(_WHY_NOT[way], key=flag, way_out="Leave it out.")
    if request.data is None and way == "benchmark":
        raise UsageError("the set's folder is not given", key="--data", way_out="Name it: --data sets/DocVQA.")
    if request.data is None and way in ("rows", "recogniser"):
        raise UsageError("no rows are given", key="--data", way_out="Name a file of rows: --data test.jsonl.")


def _check_judge(request: EvaluateRequest) -> None:
    """Raise `UsageError` unless a judge has an address and a name, and decides what is right or wrong."""
    if request.judge is None:
        for name in ("judge_model", "judge_key_env"):
            if getattr(request, name) is not None:
                way_out = "Give its address: --judge URL."
                raise UsageError("there is no judge", key=request.flag_of(name), way_out=way_out)
        return
    if request.benchmark not in (None, *JUDGED):
        what = f"the authors of {request.benchmark} score by their rule alone"
        raise UsageError(what, key="--judge", way_out=f"Leave it out: those of {' and '.join(JUDGED)} ask a model.")
    if request.judge_model is None:
        way_out = "Name the model that the server is to ask: --judge-model NAME."
        raise UsageError("the judge has no name", key="--judge", way_out=way_out)
    if request.metric not in (None, "exact"):
        way_out = "Leave --metric out."
        raise UsageError("a judge says right or wrong, and counts no words", key="--judge", way_out=way_out)
