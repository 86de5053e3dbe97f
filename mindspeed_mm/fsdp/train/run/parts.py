"""What a run is made of once everything is built: its hooks are made of these parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.train.assemble import Assembled
from mindspeed_mm.fsdp.train.family import Family
from mindspeed_mm.fsdp.train.run.data import Pass, RunData, RunLoader
from mindspeed_mm.fsdp.train.run.job import Job
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.train.run.resume import ResumePoint


@dataclass(frozen=True)
class RunParts:
    """The parts of one start of a run."""

    arguments: Arguments
    """The whole configuration."""
    job: Job
    """This rank."""
    record: RunRecord
    """Where the run is told and written down."""
    resume: ResumePoint
    """Where it starts, and who writes its checkpoints."""
    data: RunData
    """The data sets."""
    loader: RunLoader
    """The training data."""
    assembled: Assembled
    """The model, sharded and loaded."""
    family: Family
    """What its kind of model asks of a run."""
    held_out: Callable[[], Pass | None]
    """Makes what makes passes over held-out samples; None where there are none."""
    write_beside: Callable[[Path], None] | None = None
    """Makes another layout of each Hugging Face folder that is saved (`save_format: hf`); called on the first rank."""
