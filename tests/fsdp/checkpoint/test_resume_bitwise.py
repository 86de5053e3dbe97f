"""A resumed run is the uninterrupted one, bit for bit, on one rank and on two; another world size finds the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fsdp.checkpoint.small_run import build, differing, everything, manager, train_step
from tests.helpers.distributed import run_ranks


def train(model: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last + 1):
        train_step(model, optimizer, step)


def unbroken_and_resumed(save: str, save_async: bool) -> dict[str, Any]:
    """Six steps with a save after the third, against the same from the saved state in a model of other weights."""
    model, optimizer = build()
    torch.manual_seed(5 + dist.get_rank())
    train(model, optimizer, 1, 3)
    saved = everything(model, optimizer)
    checkpoints = manager(save, save_async=save_async)
    state = {"iteration": 3, "data_position": {"epoch": 0, "index": 12}, "rng": {"cpu": torch.get_rng_state()}}
    checkpoints.save(3, model, optimizer, state)
    train(model, optimizer, 4, 6)  # an asynchronous save must not see these
    checkpoints.wait()
    unbroken = everything(model, optimizer)

    model, optimizer = build(seed=1)
    found = checkpoints.find_latest()
    assert found is not None
    loaded = checkpoints.load(found, model, optimizer)
    at_load = everything(model, optimizer)
    torch.set_rng_state(loaded["rng"]["cpu"])
    train(model, optimizer, 4, 6)
    return {
        "at_load": differing(saved, at_load),
        "after": differing(unbroken, everything(model, optimizer)),
        "moved": differing(unbroken, at_load),
        "state": {key: value for key, value in loaded.items() if key != "rng"},
        "saved": saved,
    }


def load_only(save: str) -> dict[str, Any]:
    model, optimizer = build(seed=2)
    checkpoints = manager(save)
    found = checkpoints.find_latest()
    assert found is not None
    loaded = checkpoints.load(found, model, optimizer)
    return {"rng": loaded["rng"], "tensors": everything(model, optimizer)}


@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
def test_resume_is_bitwise_and_reshards(save_async: bool, tmp_path: Path) -> None:
    saved = {}
    for world_size in (1, 2):
        for outcome in run_ranks(world_size, unbroken_and_resumed, str(tmp_path / str(world_size)), save_async):
            assert outcome["at_load"] == []
            assert outcome["after"] == []
            assert "block.0.weight" in outcome["moved"]  # the comparison can fail
            assert outcome["state"] == {"iteration": 3, "data_position": {"epoch": 0, "index": 12}}
            saved[world_size] = outcome["saved"]
    for saved_by, loaded_by in ((1, 2), (2, 1)):
        for outcome in run_ranks(loaded_by, load_only, str(tmp_path / str(saved_by))):
            assert differing(saved[saved_by], outcome["tensors"]) == []
            assert outcome["rng"] is None


def test_idle_parameters_have_no_state_and_frozen_ones_are_kept(tmp_path: Path) -> None:
    [outcome] = run_ranks(1, unbroken_and_resumed, str(tmp_path), False)
    names = outcome["saved"].keys()
    assert outcome["saved"]["frozen.weight"].dtype == torch.bfloat16
    assert "block.0.weight/exp_avg" in names
    assert not any(name.startswith("idle.weight/") for name in names)
