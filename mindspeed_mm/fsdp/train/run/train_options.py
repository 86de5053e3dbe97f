"""What a start says that the configuration does not: options of the command line."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_mm.core.request import Request, option


@dataclass(frozen=True)
class ResumeOptions(Request):
    """The part of the command line that decides where a run starts."""

    resume: bool = option(
        "auto: continue from the newest checkpoint in training.save; never: refuse a folder that has one.",
        True,
        words=("auto", "never"),
    )
    weights_only: bool = option("Load only a checkpoint's weights and start at step 0.", False)
    allow_fresh: bool = option("Start from the beginning even though no checkpoint in the run folder is valid.", False)
    accept_data_change: bool = option(
        "Continue although the data set or its order has changed; train on features although their rows have changed.",
        False,
    )


@dataclass(frozen=True)
class TrainOptions(ResumeOptions):
    """What the command line adds to a configuration."""

    steps: int | None = option("Stop after this many steps, counted from this start.", least=1)
    """The schedule stays that of the whole run."""
    dry_run: bool = option("Build everything, then stop before the first step.", False)
    verbose: bool = option(
        "Print how the model is split, packed and sped up; the log file always has it.", False, also="-v"
    )
    """Otherwise four lines are printed before the first step. A dry run prints everything."""
    progress_to_stderr: bool = False
    """Leave stdout to the result."""
    plain_lines: bool = False
    """Show steps as lines in the words of older tools, which scripts read, instead of a table."""
    raises_on_second_interrupt: bool = False
    """Raise `KeyboardInterrupt` at the second signal instead of ending the process, which belongs to somebody else."""
    packs: bool | None = None
    """Put the samples of a micro-batch into one row, or each into its own, whatever the configuration says: to compare
    the two."""
