"""What passes between `mm train --nproc N` and the ranks that it started: files in a folder that both know.

A rank leaves a note of why it failed, so that the launcher can say it once and last; the launcher leaves the wish to
stop there, since a signal through torchrun's agent would also mean "a peer has died: end within seconds".
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_mm.core.artifacts import atomic_write_text

FOLDER_VARIABLE = "MM_LAUNCH_FOLDER"


@dataclass(frozen=True)
class RankFailure:
    """Why a rank ended."""

    message: str
    exit_code: int
    time: float
    lost_peers: bool = False
    """The rank only noticed that another one was gone."""
    printed: bool = False
    """The rank has said it itself."""


@dataclass(frozen=True)
class LaunchFolder:
    """The folder of one start of `mm train --nproc N`."""

    path: Path

    @classmethod
    def of_this_rank(cls, environment: Mapping[str, str] = os.environ) -> LaunchFolder | None:
        """The folder of the launcher that started this process; None when something else did."""
        name = environment.get(FOLDER_VARIABLE)
        return cls(Path(name)) if name else None

    def ask_to_stop(self) -> None:
        """Called by the launcher: every rank is to save and to stop."""
        (self.path / "stop").touch()

    def stop_asked(self) -> bool:
        """Whether the launcher wants an end; called by ranks between steps."""
        return (self.path / "stop").exists()

    def report(self, rank: int, message: str, exit_code: int, *, lost_peers: bool, printed: bool) -> None:
        """Called by a rank that is about to end."""
        failure = RankFailure(message, exit_code, time.time(), lost_peers, printed)
        atomic_write_text(self.path / f"rank{rank}.json", json.dumps(asdict(failure)))

    def failure_of(self, rank: int) -> RankFailure | None:
        """What a rank has reported."""
        path = self.path / f"rank{rank}.json"
        return RankFailure(**json.loads(path.read_text())) if path.exists() else None
