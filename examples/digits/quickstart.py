"""The whole road on real data, on a laptop CPU: make data and model, train, export, evaluate, report.

`make quickstart` runs this after installation; so does `python examples/digits/quickstart.py [FOLDER]` (default
`runs/digits`). Run again, it says what it reuses; an interrupted training goes on from its newest checkpoint.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: more threads than free cores slow one another down
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm.core.artifacts import atomic_write_text, sha256_file
from mindspeed_mm.core.errors import MMError

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.sampling.answers.scored import Evaluation

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONFIG = HERE / "digits_tiny_config.yaml"
DEFAULT_FOLDER = Path("runs/digits")
GOAL = 0.95
COMPARED_ROWS = 24
MAX_NEW_TOKENS = 16


class Quickstart:
    """The parts in their order, each timed.

    Args:
        folder: Where everything goes: `data`, `model`, `run`, `hf`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_folder = folder / "run"
        self.test_rows = folder / "data" / "test.jsonl"
        self.seconds: dict[str, float] = {}

    def run(self) -> int:
        """Everything; returns the exit code."""
        with self.part("set-up: data and model folder"):
            self.make_data()
        with self.part("training"):
            self.train()
        with self.part("export"):
            self.export()
        with self.part("evaluation"):
            evaluation = self.evaluate()
        with self.part("comparison with plain transformers"):
            self.compare_with_transformers()
        with self.part("report"):
            self.report()
        self.print_times()
        print(*evaluation.lines(), sep="\n")
        naming = evaluation.tasks["naming"].to_dict()["accuracy"]
        if naming < GOAL:
            print(f"naming a digit is below {GOAL:.0%}", file=sys.stderr)
        return 0 if naming >= GOAL else 1

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Head a part, and time it."""
        print(f"\n── {name}", flush=True)
        began = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - began, 1)

    def make_data(self) -> None:
        """The data set and the model folder, unless this very recipe has made them already."""
        mark = self.folder / "made-by.txt"
        recipe = recipe_hash()
        if mark.exists() and mark.read_text() == recipe:
            print(f"reused: {self.folder}/data, {self.folder}/model")
            return
        call([sys.executable, str(HERE / "make_digits.py"), str(self.folder)])
        atomic_write_text(mark, recipe)

    def train(self) -> None:
        """`mm train`, which goes on from a checkpoint if there is one."""
        call([sys.executable, "-m", "mindspeed_mm", "train", str(CONFIG), *self.overrides()])

    def overrides(self) -> list[str]:
        """What the configuration needs to be told when the folder is not the default one."""
        if self.folder == DEFAULT_FOLDER:
            return []
        data = self.folder / "data"
        basic = "data.dataset_param.basic_parameters"
        return [
            f"model.model_name_or_path={self.folder / 'model'}",
            f"{basic}.dataset={data / 'train.jsonl'}",
            f"{basic}.dataset_dir={data}",
            f"{basic}.val_dataset={data / 'validation.jsonl'}",
            f"training.save={self.run_folder}",
        ]

    def export(self) -> None:
        """A Hugging Face folder from the newest checkpoint."""
        from mindspeed_mm.tasks.export import export
        from mindspeed_mm.tasks.requests.export import ExportRequest

        say(f"mm export {self.run_folder} {self.folder / 'hf'} --overwrite")
        exported = export.run(ExportRequest(self.run_folder, self.folder / "hf", overwrite=True))
        print(f"{exported.folder}: step {exported.step}, {exported.size_bytes / 2**20:.1f} MiB")

    def evaluate(self) -> Evaluation:
        """Answers to all held-out questions, from the exported folder."""
        from mindspeed_mm.tasks.evaluate import evaluate
        from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest

        out = self.run_folder / "eval"
        say(f"mm evaluate {self.folder / 'hf'} --data {self.test_rows} --out {out} --max-new-tokens {MAX_NEW_TOKENS}")
        asked = EvaluateRequest(str(self.folder / "hf"), data=self.test_rows, out=out, max_new_tokens=MAX_NEW_TOKENS)
        evaluation = evaluate.run(asked)
        print(f"{evaluation.overall.n} held-out questions answered; samples and results are in {out}")
        return evaluation

    def compare_with_transformers(self) -> None:
        """The exported folder must say the same, token for token, without this project's code."""
        from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
        from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
        from mindspeed_mm.fsdp.sampling.answers.questions import read_questions
        from mindspeed_mm.tasks.answer.generation import load_generator

        questions = read_questions(self.test_rows, needs_answers=True)[:COMPARED_ROWS]
        batches = load_generator(self.folder / "hf").answer(
            questions,
            MediaLoader(self.test_rows.parent),
            sampling=Sampling(MAX_NEW_TOKENS, temperature=0),
            batch_size=COMPARED_ROWS,
        )
        ours = {question.row: list(answer.token_ids) for batch in batches for question, answer in batch}
        theirs = plain_transformers_answers(self.folder / "hf", self.test_rows, COMPARED_ROWS)
        differing = [q.id for q, answer in zip(questions, theirs, strict=True) if ours[q.row] != answer]
        if differing:
            raise SystemExit(f"transformers alone answers otherwise: {', '.join(differing)}")
        print(f"transformers alone gives the same tokens on {len(theirs)} of {len(theirs)} rows")

    def report(self) -> None:
        """One HTML page."""
        from mindspeed_mm.tasks.report import report

        say(f"mm report {self.run_folder}")
        print(report.run([self.run_folder]))

    def print_times(self) -> None:
        """Seconds of each part; set-up apart from the rest."""
        setup, *parts = self.seconds.items()
        print(f"\n{setup[0]:40s} {setup[1]:6.1f} s")
        for name, seconds in parts:
            print(f"{name:40s} {seconds:6.1f} s")
        print(f"{'all but set-up':40s} {sum(seconds for _, seconds in parts):6.1f} s\n")


def plain_transformers_answers(folder: Path, rows: Path, count: int) -> list[list[int]]:
    """Answers to the first rows, one by one, with nothing but transformers and Pillow."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    answers = []
    for line in rows.read_text(encoding="utf-8").splitlines()[:count]:
        row = json.loads(line)
        question = row["messages"][0]["content"].removeprefix("<image>")
        content = [{"type": "image"}, {"type": "text", "text": question}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        image = Image.open(rows.parent / row["images"][0]).convert("RGB")
        inputs = processor(text=[prompt], images=[image], return_tensors="pt")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        answers.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


def recipe_hash() -> str:
    """Changes when the scripts that make data and model change."""
    hashes = [sha256_file(HERE / name) for name in ("make_digits.py", "tiny_model.py")]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def call(command: list[str]) -> None:
    """Run a command, shown as a person would type it; its exit code ends this program when it is not 0."""
    words = [word.replace(f"{ROOT}/", "") for word in command]
    say(" ".join(words).replace(f"{words[0]} -m mindspeed_mm", "mm").replace(words[0], "python"))
    with subprocess.Popen(command) as process, signals_left_to(process):
        code = process.wait()
    if code:
        raise SystemExit(code)


@contextmanager
def signals_left_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """While a command runs, stopping is its business: the training saves first, then ends with 75."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),  # a terminal sends it to both
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(command: str) -> None:
    """Show a command."""
    print(f"$ {command}", flush=True)


def main() -> int:
    """Run the quick start from the repository's root, where the configuration's paths begin."""
    folder = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else DEFAULT_FOLDER
    os.chdir(ROOT)
    try:
        return Quickstart(folder).run()
    except MMError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
