"""The command `mm train`: trains a model from one YAML file."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from mindspeed_mm.cli.resuming import resume_options, resume_words
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.core.terminal import say_json
from mindspeed_mm.fsdp.train.run.launched import starts_ranks
from mindspeed_mm.fsdp.train.run.resume_options import ResumeOptions
from mindspeed_mm.tasks import train

EXAMPLES = """
\b
Examples:
  mm train examples/digits/digits_tiny_config.yaml
  mm train run.yaml --nproc 8 training.lr=2e-5 parallel.fsdp_plan.param_dtype=bf16
  torchrun --nproc-per-node 8 -m mindspeed_mm train run.yaml
"""


@click.command(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option(
    "--nproc", type=click.IntRange(min=1), default=1, help="Number of ranks on this host; more than 1 starts torchrun."
)
@click.option("--dry-run", is_flag=True, help="Build everything, then stop before the first step.")
@click.option("--steps", type=click.IntRange(min=1), help="Stop after this many steps, counted from this start.")
@resume_options
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print how the model is split, packed and sped up; the log file always has it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def command(
    config: Path,
    overrides: tuple[str, ...],
    nproc: int,
    dry_run: bool,
    steps: int | None,
    start: ResumeOptions,
    verbose: bool,
    as_json: bool,
) -> int:
    """Train the model of CONFIG. OVERRIDES are section.key=value, each parsed as YAML.

    Running the same command again continues from the newest checkpoint. Ctrl-C or SIGTERM saves one and ends with exit
    code 75; a second one stops at once.
    """
    if starts_ranks(nproc):
        words = resume_words(start)
        if steps:
            words += ["--steps", str(steps)]
        if dry_run:
            words.append("--dry-run")
        if verbose:
            words.append("--verbose")
        if as_json:
            words.append("--json")
        return train.run_ranks(nproc, config, overrides, words)
    try:
        outcome = train.run(
            config,
            overrides,
            steps=steps,
            dry_run=dry_run,
            verbose=verbose,
            progress_to_stderr=as_json,
            **asdict(start),
        )
    except Exception as error:
        if train.tell_launcher(error) and isinstance(error, MMError):
            return int(error.exit_code)  # the launcher prints it, once for all ranks
        raise
    if as_json and os.environ.get("RANK", "0") == "0":
        say_json(vars(outcome))
    return outcome.exit_code
