"""Promises measured on an accelerator: what is written of them, and a rehearsal of everything on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import accelerator_promises as promises
from benchmarks.accelerator import PARTS, Session, has_failed
from benchmarks.accelerator_page import page_of, promise_figures
from benchmarks.accelerator_promised_work import Ways
from benchmarks.machine import ROOT

CPU = torch.device("cpu")


def promise_of(ours_s: float, other_s: float, *, differ: float = 0.0) -> promises.Promise:
    """One whose calls last so long, and whose results differ so much."""

    def way(seconds: float, value: float) -> Any:
        def call() -> list[torch.Tensor]:
            time.sleep(seconds)
            return [torch.tensor([value])]

        return call

    made = Ways(way(ours_s, 1.0 + differ), way(other_s, 1.0))
    return promises.Promise(lambda *_: made, 1.0, "the other", tolerance=1e-3)


def verdict(promise: promises.Promise, folder: Path, limit_s: float = 5.0) -> dict[str, Any]:
    return promises.judged(promise, CPU, folder / "new", limit_s, tiny=True)


def test_a_promise_that_holds(tmp_path: Path) -> None:
    found = verdict(promise_of(0.0, 0.02), tmp_path)
    assert found["held"] and found["ratio"] < 1 and len(found["ours_ms"]) == promises.ROUNDS


def test_slower_is_a_miss(tmp_path: Path) -> None:
    found = verdict(promise_of(0.02, 0.0), tmp_path)
    assert not found["held"] and "as long" in found["why_not"]


def test_other_results_are_a_miss(tmp_path: Path) -> None:
    found = verdict(promise_of(0.0, 0.02, differ=0.01), tmp_path)
    assert not found["held"] and "results differ by 0.01" in found["why_not"]


def test_no_number_is_a_miss(tmp_path: Path) -> None:
    assert not verdict(promise_of(0.0, 0.02, differ=float("nan")), tmp_path)["held"]


def test_an_error_and_a_lack_of_time_are_verdicts(tmp_path: Path) -> None:
    def broken(*_: object) -> Ways:
        raise RuntimeError("no kernel image")

    found = {
        "a": verdict(replace(promise_of(0.0, 0.0), make=broken), tmp_path),
        "b": verdict(promise_of(0.0, 0.0), tmp_path, limit_s=0.0),
        "c": {**verdict(promise_of(0.0, 0.02), tmp_path / "c"), "published": "others 2 ×"},
    }
    assert "no kernel image" in found["a"]["error"] and "time was used up" in found["b"]["error"]
    assert has_failed(found)
    assert [figure.met for figure in promise_figures(found)] == [False, False, True]
    page = page_of({"device": {"type": "cpu"}, "tiny": False, "promises": found}, "TABLE")
    assert "1 of 3 promises held" in page and "NOT RUN  a" in page and "others 2 ×" in page and "TABLE" in page


def test_what_was_measured_stays_when_the_process_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.processes import ProcessFailed

    session = Session(tmp_path, {"type": "cpu"}, tiny=True)

    def cut_off(*words: str, limit_s: float) -> None:
        (tmp_path / "promises").mkdir()
        promises.write(tmp_path / "promises", {"a": {"held": True}, "b": {"error": "begun, and not ended"}})
        raise ProcessFailed("took too long")

    monkeypatch.setattr(session, "_module", cut_off)
    found = session.promises()
    assert found["a"] == {"held": True} and has_failed(found) and "took too long" in found["error"]


@pytest.mark.slow
def test_rehearsal_of_every_part(tmp_path: Path) -> None:
    out = tmp_path / "accelerator.json"
    words = ["--device", "cpu", "--tiny", "--limit-s", "2800", "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.accelerator", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert set(PARTS) <= found.keys() and not any(has_failed(found[part]) for part in PARTS)
    assert promises.PROMISES.keys() <= found["promises"].keys()
    page = out.with_suffix(".txt").read_text(encoding="utf-8")
    assert all(name in " ".join(page.split()) for name in promises.PROMISES) and "NOT RUN" not in page
