"""What verifications find, without starting a command for each."""

from __future__ import annotations

import shutil
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
    the groups of a run, and their threads, end with them. Those that differ in their fault alone share a reference."""
    references: dict[Asked, VerifyJob] = {}
    found: dict[str, list[Row] | str] = {}
    for number, (name, each) in enumerate(asked.items()):
        plain = each._replace(fault=None)
        try:
            if plain not in references:
                references[plain] = _reference(ranks, plain, folder / f"reference{number}")
            found[name] = _planned(ranks, references[plain], each.fault, folder / f"planned{number}")
        except (MMError, RankBugError) as error:
            found[name] = str(error)  # the other verifications go on
    return found


def _reference(ranks: int, asked: Asked, folder: Path) -> VerifyJob:
    job = job_of(asked, folder)
    assert job.setup.sizes.world == ranks
    (reference,) = run_ranks(1, f"{IN_RANKS}:run_reference", job, str)
    return reference.job


def _planned(ranks: int, reference: VerifyJob, fault: str | None, folder: Path) -> list[Row]:
    folder.mkdir()
    shutil.copy(reference.folder / "reference.safetensors", folder)
    return worst_rows(run_ranks(ranks, f"{IN_RANKS}:run_planned", replace(reference, folder=folder, fault=fault), str))


def job_of(asked: Asked, folder: Path) -> VerifyJob:
    folder.mkdir(parents=True)
    config = load_with_plugins(asked.yaml, asked.overrides)
    setup = set_up(config.arguments, None, folder / "cache", full=asked.full)
    return VerifyJob(config, setup, folder, full=asked.full, fault=asked.fault)
