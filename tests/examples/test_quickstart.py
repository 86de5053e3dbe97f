"""The quick start as a user runs it, twice: the second time everything is there already. Minutes, so not by default."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "examples" / "digits" / "quickstart.py"
LAST_LINE = re.compile(r"accuracy, [a-z-]+: \d+\.\d % \(n=\d+, 95 % interval \d+\.\d–\d+\.\d %\)")


@pytest.mark.slow
def test_quickstart(tmp_path: Path) -> None:
    command = [sys.executable, str(QUICKSTART), str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert first.returncode == 0, first.stderr[-3000:]
    accuracies = first.stdout.splitlines()[-3:]
    assert all(LAST_LINE.fullmatch(line) for line in accuracies)
    assert "the same tokens on 24 of 24 rows" in first.stdout
    assert (tmp_path / "run" / "report.html").stat().st_size < 2_000_000

    second = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert second.returncode == 0, second.stderr[-3000:]
    assert "reused:" in second.stdout
    assert second.stdout.splitlines()[-3:] == accuracies
