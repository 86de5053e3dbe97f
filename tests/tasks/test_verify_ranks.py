"""Ranks of `mm verify` do not outlive it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.helpers.processes import wait_until_gone

SCRIPT = """
import sys
from mindspeed_mm.tasks.verify.ranks import run_ranks
if __name__ == "__main__":
    run_ranks(2, "tests.tasks.test_verify_ranks:wait", sys.argv[1], lambda what: None)
"""


def wait(job: str, tell: Callable[[str], None]) -> None:
    """What a rank does: say which process it is, and go on for longer than a test lasts."""
    Path(job, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)


def test_ranks_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "command.py"
    script.write_text(SCRIPT)
    files = [tmp_path / "0", tmp_path / "1"]
    command = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], env=os.environ | {"PYTHONPATH": str(Path.cwd())}
    )
    try:
        limit_s = time.monotonic() + 120
        while not all(file.exists() and file.read_text() for file in files):
            assert command.poll() is None and time.monotonic() < limit_s
            time.sleep(0.05)
    finally:
        command.kill()
        command.wait()
    wait_until_gone([int(file.read_text()) for file in files], limit_s=60)
