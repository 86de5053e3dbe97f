"""`mm profile`: records steps of a run, or takes traces that are there, and says what holds the steps up."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.errors import ExitCode, UsageError
from mindspeed_mm.fsdp.tools.trace_analysis import Analysis, analyse, find_traces
from mindspeed_mm.tasks import train
from mindspeed_mm.tasks.requests.measure import ProfilingRequest

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Profiled:
    """What was found, and where the traces are."""

    traces: list[Path]
    analysis: Analysis | None
    """None when the run failed."""
    exit_code: int


def run_trace(path: Path) -> Profiled:
    """Analyse a trace, or those of a folder.

    Raises:
        DataError: There is none, or one cannot be read.
    """
    return Profiled(find_traces(path), analyse(path), int(ExitCode.OK))


def run_config(request: ProfilingRequest) -> Profiled:
    """Train until the last of the steps, record them on every rank, and analyse what was recorded. Nothing is saved,
    no checkpoint of the run is touched or continued.

    Args:
        request: A YAML, with overrides (those of `tools.profile.static_param` say what is recorded), the steps, the
            ranks and the folder for traces.

    Raises:
        UsageError: `out` holds traces.
        MMError: As `mm train`.
    """
    (first, end), nproc, config = request.recorded, request.nproc or 1, request.target
    out = request.out or _new_folder(Path("profiling"), config.stem)
    if out.is_dir() and any(out.glob("*.trace.json*")):
        raise UsageError("holds traces of another profile", where=str(out), way_out="Choose another folder.")
    own = [
        # after the caller's overrides, so that nothing brings them back
        "training.save=null",
        "training.val_interval=0",
        "tools.memory_profile.enable=false",
        "tools.profile.enable=true",
        "tools.profile.profile_type=static",
        "tools.profile.ranks=[-1]",
        f"tools.profile.static_param.start_step={first}",
        f"tools.profile.static_param.end_step={end}",
        f"tools.profile.static_param.save_path={out.absolute()}",
        "tools.profile.static_param.analyse_flag=false",
    ]
    with _stdout_kept():
        if nproc > 1:
            code = train.run_ranks(nproc, config, [*request.overrides, *own], ["--steps", str(end - 1)])
        else:
            code = train.run(config, [*request.overrides, *own], steps=end - 1, progress_to_stderr=True).exit_code
    if code != ExitCode.OK:
        return Profiled([], None, code)
    return Profiled(find_traces(out), analyse(out), code)


def _new_folder(parent: Path, name: str) -> Path:
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"


@contextmanager
def _stdout_kept() -> Iterator[None]:
    """What the run prints, and what its ranks print, goes to stderr: stdout is for the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    # the descriptor, not `sys.stdout`: ranks and libraries write to it themselves
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
