"""Many verifications in two starts of processes: what each finds, without starting a command for each."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mindspeed_mm.tasks.train import load_with_plugins
from mindspeed_mm.tasks.verify_ranks import Tell, run_ranks
from mindspeed_mm.tasks.verify_run import run_planned, run_reference
from mindspeed_mm.tasks.verify_setup import Job, set_up
from mindspeed_mm.tasks.verify_table import Row, worst_rows


class Asked(NamedTuple):
    """One verification."""

    yaml: Path
    overrides: tuple[str, ...] = ()
    fault: str | None = None
    full: bool = False


def verify_all(ranks: int, asked: dict[str, Asked], folder: Path) -> dict[str, list[Row]]:
    """Name → rows, of verifications that all take so many processes."""
    jobs = {name: job_of(each, folder / str(number)) for number, (name, each) in enumerate(asked.items())}
    assert {job.setup.sizes.world for job in jobs.values()} == {ranks}
    (prepared,) = run_ranks(1, f"{__name__}:references", jobs, str)
    found = run_ranks(ranks, f"{__name__}:planned", prepared, str)
    return {name: worst_rows([of_rank[name] for of_rank in found]) for name in asked}


def job_of(asked: Asked, folder: Path) -> Job:
    folder.mkdir(parents=True)
    config = load_with_plugins(asked.yaml, asked.overrides)
    setup = set_up(config.arguments, None, folder / "cache", full=asked.full)
    return Job(config, setup, folder, full=asked.full, fault=asked.fault)


def references(jobs: dict[str, Job], tell: Tell) -> dict[str, Job]:
    return {name: run_reference(job, tell).job for name, job in jobs.items()}


def planned(jobs: dict[str, Job], tell: Tell) -> dict[str, list[Row]]:
    return {name: run_planned(job, tell) for name, job in jobs.items()}
