"""Joining a job: what launchers say, what is wrong with it, and a group of one."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.distributed.job import launch
from mindspeed_mm.fsdp.distributed.job.launch import (
    LaunchInfo,
    first_host,
    initialize_distributed,
    resolve_launch,
    shutdown_distributed,
)
from mindspeed_mm.fsdp.utils import device
from tests.helpers.distributed import run_ranks

SLURM = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_ID": "20003",
}
TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}


def test_a_process_on_its_own():
    assert resolve_launch({}) == LaunchInfo(rank=0, local_rank=0, world_size=1)


def test_a_shell_inside_an_allocation_is_on_its_own():
    assert resolve_launch({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}).world_size == 1


def test_torchrun():
    assert resolve_launch(TORCHRUN) == LaunchInfo(3, 1, 4, "10.0.0.1", 1234)


def test_torchrun_inside_slurm_wins():
    assert resolve_launch(SLURM | TORCHRUN).world_size == 4


def test_slurm_step():
    assert resolve_launch(SLURM) == LaunchInfo(5, 1, 8, "node07", 20003)


@pytest.mark.parametrize(
    ("tasks", "node", "here"), [("4(x2)", "1", 4), ("4(x2),3", "2", 3), ("8", "0", 8), ("5,3", "1", 3), ("", "0", 0)]
)
def test_ranks_of_a_slurm_node(tasks, node, here):
    info = resolve_launch(SLURM | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node})
    assert info.ranks_here == here
    assert info.spans_hosts == (0 < here < 8)


def test_torchrun_says_how_many_ranks_are_here():
    assert resolve_launch(TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}).spans_hosts
    assert not resolve_launch(TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}).spans_hosts
    assert not resolve_launch(TORCHRUN).spans_hosts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": None}, "RANK is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not set"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four', not a number"),
        ({"RANK": "4"}, "rank 4 is outside a world of 4"),
    ],
)
def test_contradictions_are_named(change, message):
    environment = {key: value for key, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(MachineError, match=message):
        resolve_launch(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node07", "node07"),
        ("a1,b2", "a1"),
        ("node[07-09,12],gpu1", "node07"),
        ("rack1-node[3,5]", "rack1-node3"),
        ("n[1-2]-ib", "n1-ib"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def leave_test_group() -> None:
    dist.barrier()  # a rank that left at once would close the connections that the other is still making
    dist.destroy_process_group()
    for name in [name for name in os.environ if name in TORCHRUN or name.startswith("SLURM")]:
        del os.environ[name]


def join_and_sum() -> list[int]:
    place = initialize_distributed(timeout_s=20)
    total = torch.ones(1)
    dist.all_reduce(total)
    shutdown_distributed()
    shutdown_distributed()
    return [*place, int(total)]


def join_alone() -> list[int]:
    leave_test_group()
    return join_and_sum()


def join_as_slurm_step(job: int) -> list[int]:
    rank = str(dist.get_rank())
    leave_test_group()
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_JOB_ID": str(job)}
    os.environ.update(SLURM | step | {"SLURM_STEP_NODELIST": "localhost"})
    return join_and_sum()


def join_without_partners() -> str:
    leave_test_group()
    os.environ.update(TORCHRUN | {"RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    try:
        initialize_distributed(timeout_s=1)
    except MachineError as error:
        return str(error)
    return ""


@pytest.mark.edge("D3")
@pytest.mark.parametrize("device_type", ["cuda", "npu", "cpu"])
def test_a_process_group_is_bound_to_its_cuda_device(device_type, monkeypatch):
    asked: list[dict] = []
    monkeypatch.setattr(launch.dist, "init_process_group", lambda backend, **options: asked.append(options))
    monkeypatch.setattr(launch, "_backend", lambda: "gloo")
    monkeypatch.setattr(device, "get_device_type", lambda: device_type)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    launch._join(launch.LaunchInfo(rank=0, local_rank=0, world_size=1), launch.timedelta(seconds=1))
    (options,) = asked
    assert options["device_id"] == (torch.device("cuda", 3) if device_type == "cuda" else None)


def test_a_group_of_one():
    assert run_ranks(1, join_alone) == [[0, 0, 1, 1]]


def test_a_slurm_step_meets():
    assert run_ranks(2, join_as_slurm_step, os.getpid()) == [[0, 0, 2, 2], [1, 1, 2, 2]]


def test_a_rank_whose_partners_never_come_says_where_it_waited():
    assert run_ranks(1, join_without_partners)[0].startswith("localhost:1  rank 1 of 4 could not join the job")
