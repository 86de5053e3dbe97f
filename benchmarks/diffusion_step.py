"""Step time of `mm train` on extracted features, all that it writes included, over a bare diffusers loop.

The bare loop's latents, text features, noise and σ lie ready in memory: they are those that our objective prepares, so
that losses agree. Four shapes in fp32, one thread a process: FLUX-style, where overhead shows, Wan-style,
CogVideoX-style, which learns v, and LTX-2-style, which learns pictures and sound.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import Report, check_losses, check_work
from benchmarks.figures import Figure, of_spread
from benchmarks.generators import COGVIDEOX, FLUX, LTX2, WAN, Shape, Workload, prepare
from benchmarks.processes import Finished
from benchmarks.turns import Contender, Turns

WARM_UP_STEPS = 20
MEASURED_STEPS = 80
ROUNDS = 6
TIMEOUT_S = 300.0
TARGET = 1.05
WORK = ("samples", "tokens")


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    shapes = {shape.name: measured(shape, work / shape.family) for shape in (FLUX, WAN, COGVIDEOX, LTX2)}
    shown = [figure for name, result in shapes.items() for figure in figures(name, result)]
    return {
        "precision": "fp32",
        "warm_up_steps": WARM_UP_STEPS,
        "measured_steps": MEASURED_STEPS,
        "unit": "ms a step",
        "floor_batches": "latents, text features, noise and σ in memory, as our objective prepared them",
        "shapes": shapes,
        "figures": [figure.to_dict() for figure in shown],
    }


def measured(shape: Shape, folder: Path) -> dict[str, Any]:
    """The rounds of one shape."""
    steps = WARM_UP_STEPS + MEASURED_STEPS
    contenders = Contenders(prepare(shape, folder, steps), steps, WARM_UP_STEPS)
    turns = Turns(contenders.floor, {"mm train": contenders.ours}, TIMEOUT_S)
    turns.measure(ROUNDS)
    summary, everyone = turns.summary(), turns.everyone()
    return {
        "batch": shape.batch_size,
        "transformer": shape.transformer,
        "equal_work": everyone[0]["work"],
        "first_losses_differ_by": check_losses(everyone),
        **summary,
    }


@dataclass(frozen=True)
class Contenders:
    """The bare loop and `mm train`, on one workload.

    Args:
        workload: Made before.
        steps: Optimizer steps of each run.
        warm_up_steps: Steps at the start that are not measured.
    """

    workload: Workload
    steps: int
    warm_up_steps: int

    def floor(self) -> Contender:
        """The bare diffusers loop."""
        words = [self.workload.shape.family, self.workload.model, self.workload.batches, self.steps]
        return self._contender("benchmarks.bare_diffusers_loop", words, lambda finished: finished.last_json())

    def ours(self) -> Contender:
        """`mm train`, two data workers, a run folder with everything that it writes by default."""
        save = Path(tempfile.mkdtemp(dir=self.workload.folder)) / "run"
        asked = [f"training.save={save}", f"training.train_iters={self.steps}", "training.save_interval=1000000"]

        def report(_: Finished) -> Report:
            lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            shutil.rmtree(save.parent)
            return with_samples(lines)

        return self._contender("mindspeed_mm", ["train", self.workload.config, *asked], report)

    def _contender(self, module: str, words: Sequence[Any], report: Callable[[Finished], Report]) -> Contender:
        def finish(finished: Finished) -> dict[str, Any]:
            steps = report(finished)
            check_work(steps, self.workload.index()[: self.steps], WORK)
            counted = steps[self.warm_up_steps :]
            begin_s, end_s = (finished.ran_s(steps[at]["time"]) for at in (self.warm_up_steps - 1, -1))
            return {
                "value": 1000 * (end_s - begin_s) / len(counted),
                "steps": len(counted),
                "work": {key: sum(step[key] for step in counted) for key in WORK},
                "first_loss": steps[0]["loss"],
                "last_loss": steps[-1]["loss"],
                "first_step_s": finished.ran_s(steps[0]["time"]),
                "peak_rss_mb": finished.peak_rss_mb,
            }

        return Contender([sys.executable, "-m", module, *map(str, words)], finish)


def with_samples(lines: list[dict[str, Any]]) -> Report:
    """Lines of `metrics.jsonl`, one a step, with the samples of each."""
    before = [0, *(line["consumed_samples"] for line in lines)]
    return [line | {"samples": line["consumed_samples"] - done} for line, done in zip(lines, before, strict=False)]


def figures(name: str, result: dict[str, Any]) -> list[Figure]:
    """Ratios and absolute times of a shape."""
    ratios = result["ratio_to_floor"]
    return [
        *(of_spread(f"{name}: {who} / bare loop, step time", ratios[who], "×", TARGET) for who in ratios),
        of_spread(f"{name}: bare loop, step time", result["floor"], "ms"),
        of_spread(f"{name}: mm train, step time", result["contenders"]["mm train"], "ms"),
    ]
