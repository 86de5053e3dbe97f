"""A run as Python prints it and as a notebook shows it: losses, the best and the newest checkpoint in one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_mm.tasks.given.run_view import Run

FOUR = (
    "<td>4</td><td>1.0000</td><td>0.2500</td><td>best</td>",
    "<td>6</td><td>0.6667</td><td>0.5000</td><td>newest</td>",
)


def records(steps: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"step": step, "loss": 4 / step} for step in range(1, steps + 1)]
    return [*found, {"step": 4, "val_loss": 0.25}, {"step": 6, "val_loss": 0.5}]


def test_the_best_and_the_newest_checkpoint_are_marked(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        (tmp_path / f"iter_{step:07d}").mkdir()
    run = Run(tmp_path, records(6), {"status": "finished"})
    html = run._repr_html_()
    assert all(row in html for row in FOUR) and html.count("<tr>") == 7
    lines = repr(run).splitlines()
    assert lines[0] == f"Run {tmp_path}  finished"
    assert [line.split() for line in lines[5:]] == [
        ["4", "1.0000", "0.2500", "best"],
        ["5", "0.8000"],
        ["6", "0.6667", "0.5000", "newest"],
    ]


def test_one_checkpoint_may_be_both(tmp_path: Path) -> None:
    (tmp_path / "iter_0000004").mkdir()
    assert "best, newest" in repr(Run(tmp_path, records(6)))


def test_a_long_run_is_spread_over_some_lines(tmp_path: Path) -> None:
    (tmp_path / "iter_0000777").mkdir()
    lines = repr(Run(tmp_path, records(1000))).splitlines()
    steps = [line.split()[0] for line in lines[2:]]
    assert len(steps) <= 13 and steps[0] == "1" and steps[-1] == "1,000" and "777" in steps


def test_a_run_without_folder_numbers_or_plain_names() -> None:
    assert repr(Run(None)) == "Run without a folder" and Run(None)._repr_html_() == "<p>Run without a folder</p>"
    odd = Run(Path("<b>&"), [{"step": 1, "loss": None}, {"step": 2, "loss": float("nan")}])
    assert "&lt;b&gt;&amp;" in odd._repr_html_() and "nan" not in repr(odd)
