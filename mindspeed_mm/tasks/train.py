"""`mm train`: reads the configuration, imports its plugins and runs the trainer in this process or in many."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import CollectedErrors, ExitCode, MMError
from mindspeed_mm.core.garbage import collecting_later, collecting_what_is_new
from mindspeed_mm.core.run_ownership import clear_unbegun_run, folders_to_make, leaving_no_unbegun_run
from mindspeed_mm.fsdp.params.loader import ResolvedConfig
from mindspeed_mm.fsdp.params.rules.path import check_paths
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.fsdp.train.run.launched import LaunchFolder, ranks_of_job
from mindspeed_mm.tasks.given.run_as_model import load_of_run


@dataclass(frozen=True)
class TrainOutcome:
    """Reports how a run ended: the last step, the exit code, and the run folder if there is one."""

    iteration: int
    exit_code: int
    save: str | None


def run(config_path: Path, overrides: Sequence[str] = (), **options: Any) -> TrainOutcome:
    """Train in this process (one rank of a job when torchrun or Slurm started it).

    Args:
        config_path: The YAML.
        overrides: `section.key=value`.
        options: Fields of `TrainOptions`.

    Raises:
        MMError: Anything that a person can act on; `StoppedAfterSave` after a stop that was asked for.
    """
    with collecting_later():
        config = load_of_run(config_path, overrides)
        # Imported here: everything above answers a wrong YAML before torch is loaded.
        with collecting_what_is_new():
            import torch._dynamo  # noqa: F401  (transformers imports it anyway; 7 MB of garbage)
        from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
        from mindspeed_mm.fsdp.train.trainer import Trainer

        with config.told_as_own(), leaving_no_unbegun_run(_save_folder(config)):
            _check_inputs(config)
            trainer = Trainer(config, TrainOptions(**options))
            trainer.train()
    return TrainOutcome(trainer.iteration, int(ExitCode.OK), config.arguments.training.save)


def run_ranks(nproc: int, config_path: Path, overrides: Sequence[str], options: Sequence[str]) -> int:
    """Train in `nproc` processes on this host and return their exit code.

    Args:
        nproc: Number of ranks on this host.
        config_path: The YAML.
        overrides: `section.key=value`.
        options: The command line's other words, for each rank.

    Raises:
        MMError: The configuration is off, or the ranks could not be started.
    """
    # A wrong YAML is answered once, here, not by every rank.
    ranks = ranks_of_job(nproc, os.environ)
    config = load_of_run(config_path, overrides, ranks=ranks)
    with config.told_as_own():
        if ranks:
            resolve_parallel_sizes(config.arguments.parallel, ranks)
        from mindspeed_mm.fsdp.train.run.start_checks import check_config

        check_config(config)
        _check_inputs(config)
    from mindspeed_mm.tasks.launch.launcher import launch

    made = folders_to_make(_save_folder(config))
    code = launch(nproc, ["train", str(config_path), *overrides, *options], config.arguments.training.save)
    if code in (ExitCode.USAGE, ExitCode.ENVIRONMENT, ExitCode.DATA):
        clear_unbegun_run(made)
    return code


_INPUTS = ("model.", "data.dataset_param.", "training.evaluate.data", "training.lora.")
"""Keys of files that must be there, each told beside the others."""


def _save_folder(config: ResolvedConfig) -> Path | None:
    save = config.arguments.training.save
    if save:
        return Path(save)
    return None


def _check_inputs(config: ResolvedConfig) -> None:
    """Where a model's folder, adapters or questions are missing, raise for all of them and for rows that cannot be
    opened: each would be refused later, without the others."""
    arguments = config.arguments
    missing = [error for error in check_paths(arguments, config.path) if error.problems[0].key.startswith(_INPUTS)]
    if not missing:
        return
    from mindspeed_mm.fsdp.data import build_mm_dataset  # seconds to import

    errors = CollectedErrors()
    errors.errors = list(missing)
    try:
        build_mm_dataset(arguments.data.dataset_param, seed=arguments.training.seed, encode_ahead=False)
    except MMError as error:
        if error.problems[0].key not in {each.problems[0].key for each in missing}:
            errors.errors.append(error)
    errors.raise_all(f"{config.path}: {len(errors.errors)} problems")


def tell_launcher(error: Exception) -> bool:
    """Leave word of why this rank ends with its launcher; returns whether the launcher will print it."""
    folder = LaunchFolder.of_this_rank()
    if folder is None:
        return False
    from mindspeed_mm.fsdp.train.run.failures import has_lost_peers

    launcher_prints = isinstance(error, MMError) and os.environ.get("MM_TRACEBACK") != "1"
    code = int(error.exit_code if isinstance(error, MMError) else ExitCode.BUG)
    folder.report(
        int(os.environ["RANK"]), str(error), code, lost_peers=has_lost_peers(error), printed=not launcher_prints
    )
    return launcher_prints
