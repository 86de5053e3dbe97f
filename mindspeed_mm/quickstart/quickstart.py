"""`mm quickstart`: writes data and a model folder, trains, exports, evaluates, asks and reports, on a laptop CPU.

Run again, it reuses the data; an interrupted training continues from its newest checkpoint.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm.core.artifacts import atomic_write_text, read_jsonl
from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.started_python import own_python, safe_environment
from mindspeed_mm.core.terminal import quoted, say
from mindspeed_mm.quickstart.folder import check_folder
from mindspeed_mm.tasks.models.first_yaml import scalar
from mindspeed_mm.tasks.schema import editor_line

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.sampling.answers.scored import Evaluation

CONFIG = "digits_tiny_config.yaml"
DEFAULT_FOLDER = Path("runs/digits")
GOAL = 0.95
"""Share of the held-out digits that are named correctly, at least."""
COMPARED_ROWS = 24
MAX_NEW_TOKENS = 16
_STANDARD_ERROR = 2


@dataclass(frozen=True)
class Learned:
    """Reports what the quick start made, and how well the model answers."""

    folder: Path
    config: Path
    run: Path
    model: Path
    """The exported folder, which plain transformers loads."""
    report: Path
    picture: Path
    """A held-out picture, for questions."""
    reused: bool
    """Whether data and model folder were there already."""
    accuracy: dict[str, JsonObject]
    """Task, or `overall` → questions, accuracy and its 95 % interval."""
    same_as_transformers: int
    """Held-out questions that plain transformers answers with the very same tokens; all that were compared."""
    seconds: dict[str, float]

    @property
    def is_good(self) -> bool:
        """Whether enough digits are named correctly."""
        return bool(self.accuracy["naming"]["accuracy"] >= GOAL)


class Quickstart:
    """The parts in their order, each timed.

    Args:
        folder: Where everything goes: `data`, `model`, the YAML, `run`, `hf`.
        err: Everything is printed to standard error.
    """

    def __init__(self, folder: Path = DEFAULT_FOLDER, *, err: bool = False) -> None:
        self.folder, self.err = folder, err
        self.config = folder / CONFIG
        self.run_folder = folder / "run"
        self.exported = folder / "hf"
        self.test_rows = folder / "data" / "test.jsonl"
        self.seconds: dict[str, float] = {}

    def run(self) -> Learned:
        """Everything, from the data to the report.

        Raises:
            UsageError: The folder holds something else.
            MachineError: Plain transformers answers otherwise than this package.
            SystemExit: A command failed, or was interrupted; with its exit code.
        """
        check_folder(self.folder)
        with self._part("set-up: data and model folder"):
            reused = self.make_data()
        with self._part("training"):
            run_mm("train", self.config, err=self.err)
        with self._part("export"):
            self.export()
        with self._part("evaluation"):
            evaluation = self.evaluate()
        with self._part("comparison with plain transformers"):
            same = self.compare_with_transformers()
        with self._part("a question"):
            picture = self.ask()
        with self._part("report"):
            report = self.report()
        self._print_times()
        self._tell("\n".join(evaluation.lines()))
        return Learned(
            self.folder,
            self.config,
            self.run_folder,
            self.exported,
            report,
            picture,
            reused,
            {name: score.to_dict() for name, score in evaluation.scores.items()},
            same,
            self.seconds,
        )

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Head a part, and time it."""
        self._tell(f"\n── {name}")
        began = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - began, 1)

    def _tell(self, text: object) -> None:
        say(text, err=self.err)

    def make_data(self) -> bool:
        """Write the data set, the model folder and the YAML; returns whether the first two were there already."""
        from mindspeed_mm.quickstart.make_digits import describe, is_made, make_digits  # torch

        reused = is_made(self.folder)
        if reused:
            self._tell(f"reused: {self.folder / 'data'}, {self.folder / 'model'}")
        else:
            self._tell(describe(self.folder, make_digits(self.folder)))
        atomic_write_text(self.config, config_text(self.folder))
        return reused

    def export(self) -> None:
        """Write a Hugging Face folder from the newest checkpoint."""
        from mindspeed_mm.tasks.export import export
        from mindspeed_mm.tasks.requests.export import ExportRequest

        show(["mm", "export", self.run_folder, self.exported, "--overwrite"], err=self.err)
        exported = export.run(ExportRequest(self.run_folder, self.exported, overwrite=True))
        self._tell(f"{exported.folder}: step {exported.step}, {exported.size_bytes / 2**20:.1f} MiB")

    def evaluate(self) -> Evaluation:
        """Answer all held-out questions with the exported model, and score the answers."""
        from mindspeed_mm.tasks.evaluate import evaluate
        from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest

        out = self.run_folder / "eval"
        limit = ["--max-new-tokens", MAX_NEW_TOKENS]
        show(["mm", "evaluate", self.exported, "--data", self.test_rows, "--out", out, *limit], err=self.err)
        asked = EvaluateRequest(str(self.exported), data=self.test_rows, out=out, max_new_tokens=MAX_NEW_TOKENS)
        evaluation = evaluate.run(asked)
        self._tell(f"{evaluation.overall.n} held-out questions answered; samples and results are in {out}")
        return evaluation

    def compare_with_transformers(self) -> int:
        """Require that the exported folder says the same, token for token, without this project's code.

        Returns:
            The number of rows that were compared.
        """
        from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
        from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
        from mindspeed_mm.fsdp.sampling.answers.questions import read_questions
        from mindspeed_mm.tasks.answer.generation import load_generator

        questions = read_questions(self.test_rows, needs_answers=True)[:COMPARED_ROWS]
        batches = load_generator(self.exported).answer(
            questions,
            MediaLoader(self.test_rows.parent),
            sampling=Sampling(MAX_NEW_TOKENS, temperature=0),
            batch_size=COMPARED_ROWS,
        )
        ours = {question.row: list(answer.token_ids) for batch in batches for question, answer in batch}
        theirs = plain_transformers_answers(self.exported, self.test_rows, COMPARED_ROWS)
        differing = [q.id for q, answer in zip(questions, theirs, strict=True) if ours[q.row] != answer]
        if differing:
            way_out = "Look for two versions of torch or transformers: mm doctor."
            what = f"plain transformers answers {len(differing)} of {len(theirs)} questions otherwise: {differing[0]}"
            raise MachineError(what, where=str(self.exported), way_out=way_out)
        self._tell(f"transformers alone gives the same tokens on {len(theirs)} of {len(theirs)} rows")
        return len(theirs)

    def ask(self) -> Path:
        """Ask the exported model about a held-out picture, as a person would; returns the picture's path."""
        row = next(row for row in read_jsonl(self.test_rows) if row["task"] == "reading")
        question, answer = (message["content"].removeprefix("<image>") for message in row["messages"])
        image = self.test_rows.parent / row["images"][0]
        run_mm("infer", self.exported, "--image", image, "--prompt", question, err=self.err)
        self._tell(f"(the picture shows {answer})")
        return image

    def report(self) -> Path:
        """Write one HTML page of the run; returns its path."""
        from mindspeed_mm.tasks.report import report

        show(["mm", "report", self.run_folder], err=self.err)
        page = report.run([self.run_folder])
        self._tell(page)
        return page

    def _print_times(self) -> None:
        """Seconds of each part; set-up apart from the rest."""
        setup, *parts = self.seconds.items()
        self._tell(f"\n{setup[0]:40s} {setup[1]:6.1f} s")
        for name, seconds in parts:
            self._tell(f"{name:40s} {seconds:6.1f} s")
        self._tell(f"{'all but set-up':40s} {sum(seconds for _, seconds in parts):6.1f} s\n")


def config_text(folder: Path) -> str:
    """The YAML of the run with its paths in this folder, and the schema of the installed package."""
    _, _, text = (files(__package__) / CONFIG).read_text(encoding="utf-8").partition("\n")
    return f"{editor_line()}\n" + re.sub(rf"{DEFAULT_FOLDER}/([\w./]+)", lambda found: scalar(folder / found[1]), text)


def next_steps(learned: Learned) -> list[str]:
    """What to type next: the environment where it is not active, then one's own model and rows."""
    steps = []
    active = os.environ.get("VIRTUAL_ENV")
    if sys.prefix != sys.base_prefix and (active is None or Path(active).resolve() != Path(sys.prefix).resolve()):
        place = Path(sys.prefix)
        if place.is_relative_to(Path.cwd()):
            place = place.relative_to(Path.cwd())
        steps.append(f"source {quoted(place / 'bin' / 'activate')}")
    return [
        *steps,
        f"mm chat {quoted(learned.model)} --image {quoted(learned.picture)}",
        f"mm train {quoted(learned.config)} training.lr=1e-3 training.save={quoted(learned.folder / 'slower')}",
        "mm init --model MODEL_FOLDER --data ROWS.jsonl",
    ]


def plain_transformers_answers(folder: Path, rows: Path, count: int) -> list[list[int]]:
    """Token ids of the answers to the first rows, one by one, with nothing but transformers and Pillow."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    answers = []
    for row in read_jsonl(rows)[:count]:
        question = row["messages"][0]["content"].removeprefix("<image>")
        content = [{"type": "image"}, {"type": "text", "text": question}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        image = Image.open(rows.parent / row["images"][0]).convert("RGB")
        inputs = processor(text=[prompt], images=[image], return_tensors="pt")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        answers.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


# --- commands ---------------------------------------------------------------------------------------------------------


def show(words: Sequence[object], *, err: bool = False) -> None:
    """Print a command as a shell takes it; with `err` to standard error."""
    say(f"$ {shlex.join(map(str, words))}", err=err)


def run_mm(*words: object, err: bool = False) -> None:
    """Run a verb of `mm` in a process of its own; its exit code ends this program when it is not 0.

    Args:
        words: The verb and what follows it.
        err: Everything that it prints goes to standard error.
    """
    show(["mm", *words], err=err)
    run_command(own_python(["-m", "mindspeed_mm", *map(str, words)]), err=err)


def run_command(command: Sequence[str], *, finds_neighbours: bool = False, err: bool = False) -> None:
    """Run a command without showing it; its exit code ends this program when it is not 0.

    Args:
        command: The program and its words.
        finds_neighbours: It is a script that imports what lies beside it.
        err: What it prints goes to standard error.
    """
    # By its number: what stands in place of `sys.stderr`, as in a notebook, need not be a file.
    output = _STANDARD_ERROR if err else None
    environment = None if finds_neighbours else safe_environment()
    with subprocess.Popen(command, stdout=output, env=environment) as process, _signals_left_to(process):
        code = process.wait()
    if code:
        raise SystemExit(code if code > 0 else 128 - code)  # a signal is told as shells tell it


@contextmanager
def _signals_left_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """While a command runs, stopping is its business: training saves first, then ends with 75."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),  # a terminal sends it to both
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
