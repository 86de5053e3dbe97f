"""What verifications find, without starting a command for each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.tasks.verify.ranks import RankBugError, run_ranks
from mindspeed_mm.tasks.verify.setup import VerifyJob, set_up
from mindspeed_mm.tasks.verify.table import Row, worst_rows

IN_RANKS = "mindspeed_mm.tasks.verify.run"


class Asked(NamedTuple):
    """One verification."""

    yaml: Path
    overrides: tuple[str, ...] = ()
    fault: str | None = None
    full: bool = False


def verify_all(ranks: int, asked: dict[str, Asked], folder: Path) -> dict[str, list[Row] | str]:
    """Name → rows, or what went wrong, of verifications that all take so many processes. Each has processes of its own:
    the groups of a run, and their threads, end with them."""
    return {name: _verify(ranks, each, folder / str(number)) for number, (name, each) in enumerate(asked.items())}


def _verify(ranks: int, asked: Asked, folder: Path) -> list[Row] | str:
    job = job_of(asked, folder)
    assert job.setup.sizes.world == ranks
    try:
        (reference,) = run_ranks(1, f"{IN_RANKS}:run_reference", replace(job, fault=None), str)
        return worst_rows(run_ranks(ranks, f"{IN_RANKS}:run_planned", replace(reference.job, fault=asked.fault), str))
    except (MMError, RankBugError) as error:
        return str(error)  # the other verifications go on


def job_of(asked: Asked, folder: Path) -> VerifyJob:
    folder.mkdir(parents=True)
    config = load_with_plugins(asked.yaml, asked.overrides)
    setup = set_up(config.arguments, None, folder / "cache", full=asked.full)
    return VerifyJob(config, setup, folder, full=asked.full, fault=asked.fault)
