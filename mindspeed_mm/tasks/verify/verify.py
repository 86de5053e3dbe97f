"""`mm verify`: the user's own configuration, as planned, against one process: loss, every gradient, clip norm, weights
after two steps; accumulated, packed and resumed runs with them. In fp64 on the CPU, on the model made small.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from mindspeed_mm.core.errors import ExitCode
from mindspeed_mm.core.model_kinds import kind_of_folder
from mindspeed_mm.fsdp.params.rules.path import check_paths
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress
from mindspeed_mm.tasks.requests.measure import VerifyRequest
from mindspeed_mm.tasks.verify.faults import PlannedRun, check_fault, find_fault
from mindspeed_mm.tasks.verify.ranks import run_ranks
from mindspeed_mm.tasks.verify.setup import VerifyJob, set_up
from mindspeed_mm.tasks.verify.table import Verification, worst_rows

RUNS = 6
"""Runs of the trainer: one process, planned, accumulated, saved, resumed, packed."""
_IN_RANKS = "mindspeed_mm.tasks.verify.run"
"""Imported there, not here: this process does without torch."""


def run(request: VerifyRequest) -> Verification:
    """Verify a configuration. Nothing is written outside of a temporary folder.

    Raises:
        MMError: Whatever `mm train` would refuse; a fault that cannot show.
    """
    fault, nproc, full = request.fault, request.nproc, request.full
    began = time.monotonic()
    if fault is not None:
        find_fault(fault)  # a word that is none is answered first
    config = load_with_plugins(request.config, request.overrides, ranks=nproc)
    arguments = config.arguments
    config.check_built()
    without_save = arguments.training.model_copy(update={"save": None})
    for error in check_paths(arguments.model_copy(update={"training": without_save})):
        raise error
    with tempfile.TemporaryDirectory(prefix="mm-verify-") as name:
        setup = set_up(arguments, nproc, Path(name) / "cache", full=full)
        if fault is not None:
            check_fault(fault, PlannedRun(setup.sizes, kind_of_folder(arguments.model.model_name_or_path)))
        job = VerifyJob(config, setup, Path(name), full=full)
        progress = WorkProgress("runs", total=RUNS)
        try:
            (reference,) = run_ranks(1, f"{_IN_RANKS}:run_reference", job, lambda told: progress.advance(bool(told)))
            job = replace(reference.job, fault=fault)
            found = run_ranks(
                setup.sizes.world, f"{_IN_RANKS}:run_planned", job, lambda told: progress.advance(bool(told))
            )
        finally:
            progress.end()
    return Verification(
        path=request.config,
        plan=describe_plan(setup.sizes),
        model=reference.model,
        changes=reference.job.setup.changes,
        rows=tuple(worst_rows(found)),
        seconds=time.monotonic() - began,
        fault=fault,
    )


def exit_code_of(found: Verification) -> int:
    """0 where all is equal, 5 where something is off; a planted fault that nobody noticed is a bug of ours."""
    if found.missed:
        return int(ExitCode.DIVERGED)
    if found.fault is not None:
        return int(ExitCode.BUG)
    return int(ExitCode.OK)


def describe_plan(sizes: ParallelSizes) -> str:
    """`4 processes: dp_shard 2 × tp 2; against one; cpu, fp64`."""
    if sizes.world == 1:
        return "1 process; against one process; CPU, fp64"
    axes = {
        "pp": sizes.pp,
        "dp_replicate": sizes.dp_replicate,
        "dp_shard": sizes.dp_shard,
        "ring": sizes.ring,
        "ulysses": sizes.ulysses,
        "tp": sizes.tp,
        "ep": sizes.ep,
    }
    words = " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
    return f"{sizes.world} processes: {words}; against one process; CPU, fp64"
