"""Processes that run in turns: their own time leaves out that of the others."""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import pytest

from benchmarks.processes import Finished, ProcessFailed, run_in_turns
from benchmarks.turns import FLOOR, Contender, Turns

WORK = "import time, json\nbegin = time.time()\ntime.sleep({0})\nprint(json.dumps([begin, time.time()]))"


def command(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_turns_of_others_do_not_count() -> None:
    began = time.time()
    # A stopped process cannot wake from its sleep: it wakes in a turn of its own.
    ended = run_in_turns({name: command(WORK.format(0.5)) for name in ("a", "b")}, timeout_s=20)
    took = time.time() - began
    assert sum(one.wall_s for one in ended.values()) == pytest.approx(took, rel=0.1)
    turns = sorted((begin, end, name) for name, one in ended.items() for begin, end in one.turns)
    assert all(end <= begin for (_, end, _), (begin, _, _) in itertools.pairwise(turns))
    for one in ended.values():
        assert len(one.turns) > 1
        begin, end = one.last_json()
        assert 0 < one.ran_s(begin) < one.ran_s(end) <= one.wall_s


def test_time_is_that_of_turns() -> None:
    one = Finished(((10.0, 11.0), (14.0, 16.0)), 0.0, None, "")
    assert [one.ran_s(when) for when in (9.0, 10.5, 12.0, 15.0, 20.0)] == [0.0, 0.5, 1.0, 2.0, 3.0]
    assert (one.started, one.wall_s) == (10.0, 3.0)


def test_what_fails_or_hangs_ends_all() -> None:
    long = command(WORK.format(60))
    with pytest.raises(ProcessFailed, match=r"(?s)ended with 1:.*ValueError: not so"):
        run_in_turns({"bad": command("raise ValueError('not so')"), "other": command(WORK.format(0.1))}, timeout_s=20)
    began = time.time()
    with pytest.raises(ProcessFailed, match="ended with -9"):
        run_in_turns({"late": long, "other": command(WORK.format(0.1))}, timeout_s=0.5)
    assert time.time() - began < 20


def test_each_round_gives_one_ratio() -> None:
    def maker(value: float) -> Any:
        return lambda: Contender(command("pass"), lambda _: {"value": value})

    turns = Turns(maker(2.0), {"ours": maker(3.0)}, timeout_s=20)
    turns.measure(2)
    assert turns.ratios("ours") == [1.5, 1.5]
    assert [run["value"] for run in turns.runs(FLOOR)] == [2.0, 2.0]
    assert turns.summary()["ratio_to_floor"]["ours"] == {"median": 1.5, "min": 1.5, "max": 1.5, "n": 2}
