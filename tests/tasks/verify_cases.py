"""Many verifications in two starts of processes: what each finds, without starting a command for each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm.tasks.train import load_with_plugins
from mindspeed_mm.tasks.verify_ranks import Tell, run_ranks
from mindspeed_mm.tasks.verify_run import Job, run_planned, run_planned_of_sizes, run_reference
from mindspeed_mm.tasks.verify_setup import set_up
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
    (prepared,) = run_ranks(1, references, jobs, str)
    found = run_ranks(ranks, planned, prepared, str)
    return {name: worst_rows([of_rank[name] for of_rank in found]) for name in asked}


def job_of(asked: Asked, folder: Path) -> Job:
    folder.mkdir(parents=True)
    config = load_with_plugins(asked.yaml, asked.overrides)
    setup = set_up(config.arguments, None, folder / "cache", full=asked.full)
    return Job(config, setup, folder, full=asked.full, fault=asked.fault)


def references(jobs: dict[str, Job], tell: Tell) -> dict[str, Any]:
    found = {}
    for name, job in jobs.items():
        reference = run_reference(job, tell)
        found[name] = (replace(job, setup=reference.setup), reference.one_size)
    return found


def planned(jobs: dict[str, Any], tell: Tell) -> dict[str, list[Row]]:
    return {
        name: (run_planned if one_size else run_planned_of_sizes)(job, tell) for name, (job, one_size) in jobs.items()
    }
