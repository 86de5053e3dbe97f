"""What passes between `mm train --nproc N` and the ranks that it started: files in a folder that both know; and what a
process reads of its environment to tell whether it is the one or the other.

A rank leaves a note of why it failed, so that the launcher can say it once and last; the launcher leaves the wish to
stop there, since a signal through torchrun's agent would also mean "a peer has died: end within seconds".
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_mm.checkpoint.layout import list_iterations
from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.errors import ExitCode
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.core.terminal import say

FOLDER_VARIABLE = "MM_LAUNCH_FOLDER"
STOPPED_AT_ONCE = 130
"""Exit code of a start that was ended without saving, as shells have it for Ctrl-C."""
LOOK_S = 10.0
"""How long the run folder may take to answer once something is wrong: a lost network takes shared folders along."""


def starts_ranks(nproc: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this command is to start ranks: it is not one itself, and the job has several, also on other hosts."""
    if "RANK" in environment:
        return False
    if nproc > 1:
        return True
    is_slurm_task = int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    hosts = environment.get("NNODES") or environment.get("PET_NNODES") or "1"
    return not is_slurm_task and hosts not in ("1", "1:1")


def ranks_of_job(nproc: int, environment: Mapping[str, str]) -> int | None:
    """Ranks on all hosts; None where their number is left open (`PET_NNODES=1:4`)."""
    hosts = environment.get("NNODES") or environment.get("PET_NNODES") or "1"
    if hosts.isdigit():
        return nproc * int(hosts)
    return None


@dataclass(frozen=True)
class RankFailure:
    """Describes why a rank ended: message, exit code and Unix time in seconds. The rank writes it for its launcher."""

    message: str
    exit_code: int
    time: float
    lost_peers: bool = False
    """The rank only noticed that another one was gone."""
    printed: bool = False
    """The rank has said it itself."""
    hangs: bool = False
    """The whole job hangs, and the rank has heard the others: nothing is left to wait for."""


@dataclass(frozen=True)
class LaunchFolder:
    """The folder of one start of `mm train --nproc N`."""

    path: Path

    @classmethod
    def of_this_rank(cls, environment: Mapping[str, str] = os.environ) -> LaunchFolder | None:
        """The folder of the launcher that started this process; None when something else did."""
        name = environment.get(FOLDER_VARIABLE)
        if name:
            return cls(Path(name))
        return None

    def ask_to_stop(self) -> None:
        """Called by the launcher: every rank is to save and to stop."""
        (self.path / "stop").touch()

    def stop_asked(self) -> bool:
        """Whether the launcher wants an end; called by ranks between steps."""
        return (self.path / "stop").exists()

    def report(
        self, rank: int, message: str, exit_code: int, *, lost_peers: bool, printed: bool, hangs: bool = False
    ) -> None:
        """Called by a rank that is about to end."""
        failure = RankFailure(message, exit_code, time.time(), lost_peers, printed, hangs)
        atomic_write_text(self.path / f"rank{rank}.json", json.dumps(asdict(failure)))

    def grace_s(self) -> float:
        """How long ranks have to end once one has failed: of several hosts they first ask who is still there."""
        for path in self.path.glob("rank*.json"):
            failure = self.failure_of(int(path.stem.removeprefix("rank")))
            if failure is not None and failure.hangs:
                return 0.5
        is_one_host = os.environ.get("NNODES", "1") == "1" and "PET_NNODES" not in os.environ
        if is_one_host:
            return 5.0
        return 20.0

    def note_record(self, run_json: Path) -> None:
        """Called by rank 0 once its run has begun: where the run is recorded."""
        atomic_write_text(self.path / "record", str(run_json.absolute()))

    def record(self) -> Path | None:
        """Where the run is recorded that rank 0 has begun; None while it has not, and where rank 0 is elsewhere."""
        note = self.path / "record"
        if note.exists():
            return Path(note.read_text())
        return None

    def failure_of(self, rank: int) -> RankFailure | None:
        """What a rank has reported."""
        path = self.path / f"rank{rank}.json"
        if path.exists():
            return RankFailure(**json.loads(path.read_text()))
        return None


def tell_of_hang(save: str | None) -> Callable[[str, bool], None]:
    """What the watchdog of this rank does with its text: the launcher gets it, to say it once and last; without one it
    is printed, by the rank that speaks for those that it can reach.

    Args:
        save: The run folder, to name the step from which the job goes on.
    """
    folder = LaunchFolder.of_this_rank()

    def tell(text: str, speaks: bool) -> None:
        if folder is not None:
            rank = int(os.environ["RANK"])
            folder.report(rank, text, int(ExitCode.ENVIRONMENT), lost_peers=False, printed=False, hangs=True)
        elif speaks:
            say("\n".join([text, *how_to_go_on(save)]), err=True)

    return tell


def correct_ending(folder: LaunchFolder, exit_code: int) -> None:
    """Called by the launcher: have `run.json` say how the whole job ended, where rank 0 could not know it (another rank
    failed first) or could not write it any more."""
    path = folder.record()
    if path is None:
        return
    with suppress(OSError, ValueError, TypeError):  # the last words are said: what is in the way now, was said before
        run = parse_json(path.read_bytes())
        if run["exit_code"] == exit_code:
            return
        status = "stopped" if exit_code in (ExitCode.RESUMABLE, STOPPED_AT_ONCE) else "failed"
        run |= {"status": status, "exit_code": exit_code, "ended": time.time()}
        atomic_write_text(path, json.dumps(run, indent=2, ensure_ascii=False) + "\n")


def how_to_go_on(save: str | None) -> list[str]:
    """The last committed step of a run, as a line; no line when there is none."""
    found: list[int] | None = None

    def look() -> None:
        nonlocal found
        found = list_iterations(Path(save)) if save else []

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(LOOK_S)
    if found is None:
        return [f"{save}: the folder does not answer from this host, so the last committed step is not known."]
    if not found:
        return []
    return [f"{save}: the last committed step is {found[-1]}. Run the same command again to continue from it."]
