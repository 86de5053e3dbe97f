"""The benchmark of feature sets that grow does what it says, with few rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import growth
from benchmarks.contenders import UnequalWorkError


@pytest.mark.slow
def test_few_rows_grow(tmp_path: Path) -> None:
    found = growth.measured(tmp_path, 6)
    assert (found["rows"], found["added"]) == (6, 1)
    assert set(found["seconds"]) == {"whole", "again", "grown"}


def test_shares_are_of_the_whole_extraction() -> None:
    shares = growth.figures({"whole": 200.0, "again": 4.0, "grown": 8.0})
    assert [figure.value for figure in shares] == [0.04, 0.02, 200.0, 4.0, 8.0]
    assert [figure.met for figure in shares] == [False, None, None, None, None]


def test_rows_that_were_lost_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Finished:
        wall_s = 1.0

        def last_json(self) -> int:
            return 9

    monkeypatch.setattr(growth, "run_process", lambda *_, **__: Finished())
    workload = growth.Workload(growth.PICTURES, tmp_path, 10)
    with pytest.raises(UnequalWorkError, match="9 rows have features instead of 10"):
        growth.extracted(workload, 10)
