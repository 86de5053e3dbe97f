"""What `benchmarks/accelerator.sh` measures first, rehearsed on the simulated device: every promise gets a verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.accelerator import has_failed
from benchmarks.machine import ROOT
from tests.helpers.simulated_device import NAME


def test_every_promise_is_tried(tmp_path: Path) -> None:
    from benchmarks.accelerator_promises import PROMISES  # seconds to import

    out = tmp_path / "accelerator.json"
    words = ["--tiny", "--parts", "promises", "--limit-s", "2800", "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.accelerator", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["device"]["type"] == NAME and not has_failed(found["promises"])
    assert PROMISES.keys() <= found["promises"].keys()
    assert found["promises"]["steps do not wait for their numbers"]["note"] == "numbers are read late / not late"
    assert "NOT RUN" not in out.with_suffix(".txt").read_text(encoding="utf-8")
