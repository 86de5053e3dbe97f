"""Shards that travel together arrive as each would by itself."""

from __future__ import annotations

from unittest import mock

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from mindspeed_mm.fsdp.train.hooks import step_record
from tests.helpers.distributed import run_ranks


def gathered(at_once: int) -> list[str]:
    """Names of tensors that are not what torch gathers, of every layout; and of none, what travelled by itself."""
    line, grid, single = (init_device_mesh("cpu", sizes) for sizes in ((4,), (2, 2), (1, 4)))
    layouts = [
        (line, [Shard(0)]),
        (line, [Shard(1)]),
        (line, [Replicate()]),
        (grid, [Replicate(), Shard(0)]),
        (grid, [Shard(1), Replicate()]),
        (grid, [Shard(0), Shard(0)]),
        (grid, [Shard(1), Shard(0)]),
        (single, [Shard(0), Shard(0)]),
        (single, [Shard(0), Replicate()]),
    ]
    whole, tensors = {"plain": torch.arange(3.0)}, {"plain": torch.arange(3.0)}
    for number, (mesh, placements) in enumerate(layouts):
        for rows, dtype in ((8, torch.float64), (3, torch.float32), (1, torch.float32), (5, torch.bfloat16)):
            name = f"{number} {rows}"
            whole[name] = torch.arange(float(rows * 6)).reshape(rows, 6).to(dtype)
            tensors[name] = distribute_tensor(whole[name], mesh, placements).requires_grad_()
    with (
        mock.patch.object(step_record, "GATHERED_AT_ONCE", at_once),
        mock.patch.object(DTensor, "full_tensor", autospec=True, side_effect=DTensor.full_tensor) as by_itself,
    ):
        found = step_record.all_full(tensors)
    assert by_itself.call_count == 4 * 4  # whole on all ranks, or cut twice
    assert list(found) == list(tensors)
    assert not any(tensor.requires_grad or isinstance(tensor, DTensor) for tensor in found.values())
    return [name for name in whole if found[name].dtype != whole[name].dtype or not found[name].equal(whole[name])]


def test_all_layouts_arrive_whole() -> None:
    for at_once in (1, 20, 1 << 24):
        assert run_ranks(4, gathered, at_once) == [[]] * 4
