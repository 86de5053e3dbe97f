"""What a start says about where it begins: words of the command line, not of the configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ResumeOptions:
    """The part of the command line that decides where a run starts."""

    resume: bool = True
    """Continue from the newest checkpoint in `training.save`; else refuse a folder that has one."""
    weights_only: bool = False
    """Take the weights of the checkpoint in `training.load` and start at step 0."""
    allow_fresh: bool = False
    """Start from the beginning although checkpoints exist and none is valid."""
    accept_data_change: bool = False
    """Continue although the data set is not the one that the checkpoint was trained on."""
