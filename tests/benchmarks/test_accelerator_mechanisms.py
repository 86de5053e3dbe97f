"""The accelerator's check of mechanisms, on the CPU: all agree, and every planted mistake would be found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.accelerator import has_failed, mechanism_figures
from benchmarks.machine import ROOT

MECHANISMS = {
    "ring attention, causal, 4 ranks in turns",
    "ring attention, full, 4 ranks in turns",
    "grouped matrix products",
    "FSDP2, one rank",
    "tensor parallelism and the loss over the vocabulary, one rank",
    "attention of spread sequences, one rank",
    "experts, alltoall, one rank",
    "experts, allgather, one rank",
    "pipeline, one rank with two stages",
}


@pytest.mark.slow
def test_all_mechanisms_agree_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "accelerator.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.accelerator",
        "--device",
        "cpu",
        "--tiny",
        "--parts",
        "mechanisms",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads(out.read_text(encoding="utf-8"))["mechanisms"]["checks"]
    assert checks.keys() == MECHANISMS
    assert all(check["worst"] <= 1.0 < check["planted"] for check in checks.values()), checks


def test_a_mechanism_that_fails_is_a_failure_and_a_miss() -> None:
    found = {"agrees": False, "error": "differ", "checks": {"a": {"agrees": False, "error": "no kernel"}}}
    assert has_failed(found)
    assert [figure.met for figure in mechanism_figures(found)] == [False]
