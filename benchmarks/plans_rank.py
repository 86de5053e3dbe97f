"""One rank of `benchmarks.plans`: all plans take turns in one job, so that nothing is imported twice.

`python -m benchmarks.plans_rank make FOLDER` makes the runs; `… measure FOLDER OUT MODEL ROUNDS LIMIT_S` measures on as
many ranks as the environment says. Rank 0 keeps the rounds and tells the others what comes next.
"""

from __future__ import annotations

import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import communication_rank
from benchmarks.communication_cases import Case
from benchmarks.plans_cases import FLOORS, MEASURED_STEPS, PLANS, SHAPES, TOKENS_A_ROW, WARM_UP_STEPS
from benchmarks.rounds import WILD, Rounds
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine


class StepTimes(Hook):
    """Seconds of each step without its wait for data, and losses."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Note them."""
        self.seconds.append(result.seconds - result.data_seconds)
        self.losses.append(result.loss)


def make_runs(folder: Path) -> None:
    """Write a folder for each model."""
    steps = {"train_iters": WARM_UP_STEPS + MEASURED_STEPS}
    communication_rank.make(folder, SHAPES, TOKENS_A_ROW, steps, param_dtype=None)


def train(folder: Path, case: Case) -> dict[str, Any]:
    """One short run under a plan, on all ranks."""
    yaml = folder / case.model / "run.yaml"
    sizes = resolve_parallel_sizes(load_with_plugins(yaml, case.words).arguments.parallel, case.ranks)
    times = StepTimes()
    communication_rank.Quiet(load_with_plugins(yaml, [*case.words, case.rows(sizes.dp)]), hooks=[times]).train()
    value = 1000 * statistics.median(times.seconds[WARM_UP_STEPS:])
    return {"value": value, "first_loss": times.losses[0], "last_loss": times.losses[-1]}


def lead(folder: Path, model: str, accepted: int, limit_s: float) -> dict[str, Any]:
    """Rank 0: the rounds. Every plan trains the same, which its losses show."""
    plans = PLANS[model]

    def announced(name: str) -> dict[str, Any]:
        dist.broadcast_object_list([name])
        return train(folder, plans[name])

    runs = {name: partial(announced, name) for name in plans}
    floor = runs.pop(FLOORS[model])
    rounds = Rounds(floor, runs, *WILD)
    rounds.measure(accepted, limit_s)
    dist.broadcast_object_list([None])
    summary = rounds.summary()
    losses = [run["last_loss"] for run in (*summary["floor_runs"], *summary["rounds"])]
    if max(losses) - min(losses) > 1e-3 * max(losses):
        raise ValueError(f"plans differ in the loss of the last step: {min(losses)} to {max(losses)}")
    return summary


def follow(folder: Path, model: str) -> None:
    """Other ranks: what rank 0 says, until it says no more."""
    while True:
        said: list[Any] = [None]
        dist.broadcast_object_list(said)
        if said[0] is None:
            return
        train(folder, PLANS[model][said[0]])


def main(folder: Path, out: Path, model: str, accepted: int, limit_s: float) -> None:
    """Measure one model's plans."""
    rank = communication_rank.join(out)
    if rank == 0:
        out.write_text(json.dumps(lead(folder, model, accepted, limit_s)), encoding="utf-8")
    else:
        follow(folder, model)
    communication_rank.leave()


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make_runs(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]), float(sys.argv[6]))
