"""The mesh: sizes, ranks and groups along every axis, and the life of the one state of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.distributed.parallel_state import (
    Axis,
    check_world_size,
    destroy_parallel_state,
    get_parallel_state,
    init_parallel_state,
)
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes
from mindspeed_mm.megatron_names import mpu
from tests.helpers.distributed import run_ranks

AXES = ("dp", "cp", "ulysses", "ring", "tp", "pp", "edp", "efsdp", "ep")


def sizes(world: int, **named: int) -> ParallelSizes:
    ones = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp", "edp", "efsdp", "ep"), 1)
    return ParallelSizes(world=world, **ones | named)


PLANS = {
    "shards": sizes(8, dp_shard=8, efsdp=8),
    "copies of shards": sizes(8, dp_replicate=2, dp_shard=4, edp=2, efsdp=4),
    "context": sizes(8, dp_shard=2, ring=2, ulysses=2, efsdp=8),
    "stages and matrices": sizes(8, pp=2, dp_shard=2, tp=2, efsdp=2),
    "experts": sizes(8, dp_replicate=2, dp_shard=4, edp=2, efsdp=2, ep=2),
}


def describe_plans() -> dict[str, dict[str, Any]]:
    """What rank 7 of 8 sees under each plan, in a group that only pretends to communicate."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=8)
    found = {}
    for name, plan in PLANS.items():
        state = init_parallel_state(plan, "cpu")
        names = {axis: axis for axis in (*AXES, "fsdp")} | {"hsdp": "dp_replicate"}
        groups = {shown: state.axis_group(axis) for shown, axis in names.items()}
        found[name] = {axis: dist.get_process_group_ranks(group) for axis, group in groups.items()}
        for axis in AXES:
            members = found[name][axis]
            assert state.axis_size(axis) == state.axis_mesh(axis).size() == len(members)
            assert members[state.axis_rank(axis)] == dist.get_rank()
            # As plugins written for MindSpeed-MM ask.
            assert getattr(state, f"get_{axis}_group_size")() == len(members)
            assert getattr(state, f"get_{axis}_group")() is state.axis_group(axis)
            assert getattr(state, f"get_{axis}_rank")() == state.axis_rank(axis)
            assert getattr(state, f"get_{axis}_device_mesh")() is state.axis_mesh(axis)
            assert getattr(state, f"is_{axis}_enable")() == (len(members) > 1)
        for with_context in (False, True):  # as scripts written for Megatron ask
            members = dist.get_process_group_ranks(mpu.get_data_parallel_group(with_context))
            assert len(members) == mpu.get_data_parallel_world_size(with_context)
            assert members[mpu.get_data_parallel_rank(with_context)] == dist.get_rank()
        assert found[name]["fsdp"][state.axis_rank("fsdp")] == dist.get_rank()
        assert state.axis_size("fsdp") == state.axis_mesh("fsdp").size() == len(found[name]["fsdp"])
        assert state.get_hsdp_device_mesh().shape == (plan.dp_replicate, plan.fsdp)
        assert state.build_copies_device_mesh().shape == (plan.dp_replicate * plan.fsdp, 1)
        assert state.axis_size("dp_replicate") == plan.dp_replicate
        found[name]["data"] = [state.data_rank, state.data_size]
        found[name]["text"] = state.describe()
        assert get_parallel_state() is state
        destroy_parallel_state()
    return found


@pytest.fixture(scope="module")
def last_rank() -> dict[str, dict[str, Any]]:
    return run_ranks(1, describe_plans)[0]


def test_shards(last_rank):
    seen = last_rank["shards"]
    assert seen["fsdp"] == seen["dp"] == list(range(8))
    assert seen["data"] == [7, 8] and seen["text"] == "dp_shard 8"


def test_copies_of_shards(last_rank):
    seen = last_rank["copies of shards"]
    assert (seen["fsdp"], seen["hsdp"], seen["dp"]) == ([4, 5, 6, 7], [3, 7], list(range(8)))
    assert seen["data"] == [7, 8] and seen["text"] == "dp_replicate 2 × dp_shard 4"


def test_context_ranks_share_samples_and_shards(last_rank):
    seen = last_rank["context"]
    assert (seen["ulysses"], seen["ring"], seen["cp"]) == ([6, 7], [5, 7], [4, 5, 6, 7])
    assert (seen["fsdp"], seen["dp"], seen["data"]) == (list(range(8)), [3, 7], [1, 2])


def test_stages_and_matrices(last_rank):
    seen = last_rank["stages and matrices"]
    assert (seen["tp"], seen["pp"], seen["fsdp"], seen["data"]) == ([6, 7], [3, 7], [5, 7], [1, 2])


def test_experts(last_rank):
    seen = last_rank["experts"]
    assert (seen["ep"], seen["efsdp"], seen["edp"], seen["fsdp"]) == ([6, 7], [5, 7], [3, 7], [4, 5, 6, 7])
    assert seen["text"] == "dp_replicate 2 × dp_shard 4 × ep 2"


def test_sizes_must_multiply_to_the_world():
    with pytest.raises(ConfigError, match="= 4, but the job has 8 processes"):
        check_world_size(sizes(8, dp_shard=4, efsdp=8), 8)
    with pytest.raises(ConfigError, match=r"edp 1 × efsdp 4 .* = 4, but the job has 8"):
        check_world_size(sizes(8, dp_shard=8, efsdp=4), 8)


def test_there_is_no_state_before_it_is_made():
    with pytest.raises(MachineError, match="no parallel state yet"):
        get_parallel_state()


def groups_of(plan: ParallelSizes) -> tuple[int, int, bool]:
    """Groups and threads that the meshes of a plan add, and whether keys and parameters travel in groups apart."""
    before, threads = len(distributed_c10d._world.pg_map), own_threads()
    state = init_parallel_state(plan, "cpu")
    state.build_copies_device_mesh()
    alone = {state.axis_group(axis).group_name for axis in get_args(Axis) if state.axis_size(axis) == 1}
    assert len(alone) == 1
    apart = state.axis_group("ring") is not state.axis_group("fsdp")
    added = len(distributed_c10d._world.pg_map) - before, own_threads() - threads
    destroy_parallel_state()
    return *added, apart


def own_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux lists them")
def test_axes_of_one_rank_share_one_group():
    for groups, threads, _ in run_ranks(2, groups_of, sizes(2, dp_shard=2, efsdp=2)):
        assert groups == 1 and threads <= 4
    for groups, _, _ in run_ranks(4, groups_of, sizes(4, dp_shard=2, tp=2, efsdp=2)):
        assert groups == 3
    for _, _, apart in run_ranks(4, groups_of, sizes(4, pp=2, ring=2, efsdp=2)):
        assert apart


def make_two_states() -> str:
    init_parallel_state(sizes(1), "cpu")
    try:
        init_parallel_state(sizes(1), "cpu")
    except MachineError as error:
        return str(error)
    return ""


def test_there_is_one_state():
    assert "exists already" in run_ranks(1, make_two_states)[0]
