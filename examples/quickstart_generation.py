"""The whole road of two generators on a laptop CPU: data and model, extraction, training, generation, judges, export.

`make quickstart-generation` runs this after installation; so does `python examples/quickstart_generation.py [NAME …]`,
with `digits_flux` (pictures), `moving_digits_wan` (clips) or both, the default, `moving_digits_i2v` (clips from a first
frame) or `digits_edit` (edited pictures); `--runs FOLDER` says where to write, by default `runs`. Run again, it says
what it reuses; an interrupted training goes on from its newest checkpoint.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: more threads than free cores slow one another down
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import hashlib
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.artifacts import atomic_write_text, sha256_file
from mindspeed_mm.quickstart import scans
from mindspeed_mm.quickstart.quickstart import run_command, run_mm, show

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
DEFAULT_RUNS = Path("runs")


@dataclass(frozen=True)
class Example:
    """One example: the folder under `examples/`, its scripts, and how many samples of each prompt are judged."""

    name: str
    maker: str
    judge: str
    num_samples: int
    prompts: str = "prompts.txt"
    """What is judged."""
    shown: str = "prompts.txt"
    """What is drawn while training."""

    @property
    def folder(self) -> Path:
        """Where its scripts are."""
        return HERE / self.name

    @property
    def config(self) -> Path:
        """Its run."""
        return self.folder / f"{self.name}_config.yaml"


EXAMPLES = {
    "digits_flux": Example("digits_flux", "make_digits_flux.py", "judge_digits.py", 40),
    "moving_digits_wan": Example("moving_digits_wan", "make_moving_digits.py", "judge_moving_digits.py", 20),
    "moving_digits_i2v": Example(
        "moving_digits_i2v",
        "make_moving_digits_i2v.py",
        "judge_moving_digits_i2v.py",
        1,
        "prompts.jsonl",
        "shown.jsonl",
    ),
    "digits_edit": Example(
        "digits_edit", "make_digits_edit.py", "judge_digits_edit.py", 1, "prompts.jsonl", "shown.jsonl"
    ),
}
DEFAULT_NAMES = ("digits_flux", "moving_digits_wan")


class Quickstart:
    """The parts of one example in their order, each timed.

    Args:
        example: Which.
        folder: Where everything goes: `data`, `model`, `features`, `run`, `samples`, `pipeline`.
    """

    def __init__(self, example: Example, folder: Path) -> None:
        self.example, self.folder = example, folder
        self.seconds: dict[str, tuple[float, float]] = {}

    def run(self) -> bool:
        """Everything; returns whether the judges' goal was reached."""
        with self.part("data and model folder"):
            self.make_data()
        with self.part("extraction"):
            run_mm("extract", str(self.example.config), *self.overrides())
        with self.part("training"):
            run_mm("train", str(self.example.config), *self.overrides())
        with self.part("generation"):
            self.generate()
        with self.part("judges"):
            reached = self.judge()
        with self.part("export, and plain diffusers"):
            self.export()
        with self.part("report"):
            run_mm("report", str(self.folder / "run"))
        self.print_times()
        return reached

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Head a part, and time it: by the clock, and on the processor."""
        print(f"\n── {self.example.name}: {name}", flush=True)
        clock, processor = time.monotonic(), processor_s()
        yield
        self.seconds[name] = (time.monotonic() - clock, processor_s() - processor)

    def make_data(self) -> None:
        """The data set and the model folder, unless this very recipe has made them already."""
        mark = self.folder / "made-by.txt"
        recipe = recipe_hash()
        if mark.exists() and mark.read_text() == recipe:
            print(f"reused: {self.folder}/data, {self.folder}/model")
            return
        self.run_script(self.example.maker)
        atomic_write_text(mark, recipe)

    def overrides(self) -> list[str]:
        """What the configuration needs to be told when the folder is not the default one."""
        if self.folder == DEFAULT_RUNS / self.example.name:
            return []
        data, basic = self.folder / "data", "data.dataset_param.basic_parameters"
        return [
            f"model.model_name_or_path={self.folder / 'model'}",
            f"{basic}.dataset={data / 'train.jsonl'}",
            f"{basic}.val_dataset={data / 'validation.jsonl'}",
            f"{basic}.dataset_dir={data}",
            f"{basic}.features_dir={self.folder / 'features'}",
            f"{basic}.val_features_dir={self.folder / 'features_validation'}",
            f"training.sampling.prompts_file={data / self.example.shown}",
            f"training.save={self.folder / 'run'}",
        ]

    def generate(self) -> None:
        """Samples of every prompt, with the average of the weights."""
        samples, count = str(self.folder / "samples"), str(self.example.num_samples)
        prompts = str(self.folder / "data" / self.example.prompts)
        run_mm("infer", str(self.folder / "run"), "--prompts", prompts, "--out", samples, "--num-samples", count)

    def judge(self) -> bool:
        """Whether the judges are content; they print what they found."""
        try:
            self.run_script(self.example.judge)
        except SystemExit as end:
            if end.code != 1:
                raise
            return False
        return True

    def export(self) -> None:
        """A folder in diffusers' layout; from it diffusers alone must draw the same."""
        from plain_diffusers import count_same

        pipeline = self.folder / "pipeline"
        run_mm("export", str(self.folder / "run"), str(pipeline), "--overwrite")
        same, drawn = count_same(pipeline, self.folder / "samples")
        if same < drawn:
            raise SystemExit(f"diffusers alone draws otherwise: {drawn - same} of {drawn} prompts")
        print(f"diffusers alone draws the same for {same} of {drawn} prompts")

    def run_script(self, name: str) -> None:
        """Run a script of the example on this folder; its failure ends this program."""
        script = self.example.folder / name
        show(["python", script.relative_to(ROOT), self.folder])
        run_command([sys.executable, str(script), str(self.folder)], finds_neighbours=True)

    def print_times(self) -> None:
        """Seconds of each part, by the clock and on the processor."""
        print(f"\n{self.example.name:30s}     clock  processor")
        total = tuple(map(sum, zip(*self.seconds.values(), strict=True)))
        for name, (clock, processor) in [*self.seconds.items(), ("all", total)]:
            print(f"  {name:30s} {clock:5.1f} s    {processor:5.1f} s")


def processor_s() -> float:
    """Seconds that this program and those that it started have used of a processor."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def recipe_hash() -> str:
    """Changes when the scripts that make data and models change; the examples share them."""
    scripts = sorted(script for name in EXAMPLES for script in (HERE / name).glob("*.py"))
    scripts.append(Path(scans.__file__))
    return hashlib.sha256("".join(sha256_file(script) for script in scripts).encode()).hexdigest()


def main() -> int:
    """Run the examples from the repository's root, where the configurations' paths begin."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"Of {', '.join(EXAMPLES)}.")
    parser.add_argument("--runs", type=Path, default=DEFAULT_RUNS, help="Folder to write to.")
    options = parser.parse_args()
    if unknown := set(options.names) - EXAMPLES.keys():
        parser.error(f"no example {', '.join(sorted(unknown))}; there are {', '.join(EXAMPLES)}")
    runs = options.runs if options.runs == DEFAULT_RUNS else options.runs.absolute()
    os.chdir(ROOT)
    reached = [Quickstart(EXAMPLES[name], runs / name).run() for name in options.names or DEFAULT_NAMES]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
