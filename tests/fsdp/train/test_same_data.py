"""Ranks that have read different rows are told so before the first step, with the difference."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.dataset import as_mm_dataset
from mindspeed_mm.fsdp.train.run.start_checks import check_same_data
from tests.helpers.distributed import run_ranks


class Rows(list[Any]):
    def fingerprint(self) -> dict[str, Any]:
        return {"rows": len(self), "hash": repr(self)}


def compare() -> list[str]:
    """What this rank is told of: the same rows, a row less, another row, another validation set, and a data set
    without a fingerprint."""
    rank = dist.get_rank()
    trials: list[dict[str, Any]] = [
        {"data": Rows("abc"), "validation": None},
        {"data": Rows("abc"[: 3 - rank]), "validation": None},
        {"data": Rows("abc" if rank == 0 else "abx"), "validation": None},
        {"data": Rows("abc"), "validation": Rows("x" if rank == 0 else "y")},
        {"data": ["a"] * (4 + rank)},
    ]
    return [said(trial) for trial in trials]


def said(trial: dict[str, Any]) -> str:
    try:
        sets = {name: None if rows is None else as_mm_dataset(rows) for name, rows in trial.items()}
        check_same_data(sets, dist.get_world_size())
    except DataError as error:
        return str(error)
    return ""


def test_ranks_compare_their_rows():
    first, second = run_ranks(2, compare)
    assert first == second  # every rank says the same
    same, fewer, other, validation, plain = first
    assert same == ""
    assert "rank 0 and rank 1 have read different data" in fewer
    assert "data.rows is 3 on the one and 2 on the other" in fewer
    assert "data.hash is" in other and "data.rows" not in other
    assert "validation.hash is" in validation
    assert "data.rows is 4 on the one and 5 on the other" in plain


def test_one_process_has_nobody_to_compare_with():
    check_same_data({"data": as_mm_dataset(Rows("abc"))}, 1)
