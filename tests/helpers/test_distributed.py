"""The rank runner itself: results, failures and hangs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import RanksFailed, run_ranks
from tests.helpers.rank_results import read_result, write_result
from tests.helpers.rank_server import threads_beside


def sum_over_ranks(base: int) -> dict[str, object]:
    total = torch.tensor(base + dist.get_rank(), dtype=torch.float64)
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "total": total}


def own_name() -> str:
    return __name__


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("planted failure")
    dist.barrier()


def hang_on_rank_one() -> None:
    while dist.get_rank() == 1:
        time.sleep(0.05)
    dist.barrier()


def test_results_come_back_in_rank_order():
    results = run_ranks(2, sum_over_ranks, 10)
    assert [result["rank"] for result in results] == [0, 1]
    assert all(result["total"] == 21 for result in results)


def test_results_are_read_as_they_were_written(tmp_path: Path):
    """Of every kind of tensor: a part of another, none at all, of one number, in halves of a word."""
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = [
        whole,
        whole[1:3, ::2],
        whole.bfloat16(),
        whole > 3,
        torch.empty(0, 3),
        torch.tensor(2, dtype=torch.int8),
    ]
    result = {"tensors": tensors, ("a", 1): [None, 2.5, {"name": (True, "word")}]}
    write_result(result, tmp_path / "result")
    found = read_result(tmp_path / "result")
    for own, expected in zip(found.pop("tensors"), result.pop("tensors"), strict=True):
        assert own.dtype == expected.dtype and own.equal(expected)
        own += own  # they may be changed
    assert found == result


def test_ranks_are_copies_of_this_process():
    """Another server would import the file under another name, after seconds of other imports."""
    if threads_beside:
        pytest.skip(f"there were threads before the first test: {threads_beside}")
    assert run_ranks(1, own_name) == [__name__]


def test_a_failing_rank_is_named_with_its_traceback():
    with pytest.raises(RanksFailed, match="planted failure"):
        run_ranks(2, fail_on_rank_one, timeout_s=20)


def test_a_hang_ends_in_time_with_every_stack():
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="hang_on_rank_one"):
        run_ranks(2, hang_on_rank_one, timeout_s=2)
    assert time.monotonic() - started < 10
