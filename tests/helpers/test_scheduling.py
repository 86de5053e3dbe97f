"""Files that take long begin first, and are there."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.scheduling import LONG, ONE_BY_ONE, LongFilesFirst

ROOT = Path(__file__).parents[2]


def test_files_that_take_long_are_there() -> None:
    assert [file for file in (*LONG, *ONE_BY_ONE) if not (ROOT / file).is_file()] == []


def test_they_are_dealt_out_first_and_the_others_in_their_order() -> None:
    files = ["tests/a.py", LONG[3], "tests/b.py", LONG[1]]
    sent: list[int] = []
    node: Any = mock.Mock(send_runtest_some=sent.extend)
    scheduler = LongFilesFirst.__new__(LongFilesFirst)
    scheduler.workqueue = OrderedDict((file, {f"{file}::test": False}) for file in files)
    scheduler.assigned_work, scheduler.registered_collections = {}, {node: [f"{file}::test" for file in files]}
    for _ in files:
        scheduler._assign_work_unit(node)
    assert [files[place] for place in sent] == [LONG[1], LONG[3], "tests/a.py", "tests/b.py"]


def test_of_some_files_each_test_is_dealt_out() -> None:
    scheduler = LongFilesFirst.__new__(LongFilesFirst)
    scopes = [scheduler._split_scope(f"{file}::test[{case}]") for file in (ONE_BY_ONE[0], LONG[0]) for case in "ab"]
    assert scopes == [f"{ONE_BY_ONE[0]}::test[a]", f"{ONE_BY_ONE[0]}::test[b]", LONG[0], LONG[0]]
