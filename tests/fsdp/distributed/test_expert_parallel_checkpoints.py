"""What is saved under one layout of experts is loaded under any other to the bit, weights and moments; so are weights
from scratch and exported folders."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.fsdp.checkpoint.hf import save_hf
from mindspeed_mm.fsdp.checkpoint.manager import CheckpointManager
from mindspeed_mm.fsdp.checkpoint.tree import optimizer_tensors
from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state, init_parallel_state
from mindspeed_mm.fsdp.optimizer.build import build_optimizer
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.fsdp.train.assemble import assemble
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import full, record_weights
from tests.helpers.tiny_models import make_tiny_qwen3_moe
from tests.helpers.tiny_run import make_rows, make_tiny_run

EP = "parallel.expert_parallel_size=2"
PLANS = {  # name → (ranks, overrides)
    "1": (1, ()),
    "ep2": (2, (EP,)),
    "fsdp2": (2, ()),
    "ep2 × efsdp2": (4, (EP,)),
    "ep2 × edp2": (4, (EP, "parallel.fully_shard_parallel_size=2")),
}
SCRATCH = "model.train_from_scratch=true"


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("checkpoints")
    make_tiny_qwen3_moe(folder / "model")
    make_rows(folder, count=2, images=(0,))
    return str(make_tiny_run(folder))


def build(yaml: str, ranks: int, *words: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    arguments = load_with_plugins(Path(yaml), list(words)).arguments
    init_parallel_state(resolve_parallel_sizes(arguments.parallel, ranks), "cpu")
    model = assemble(arguments, torch.device("cpu")).model
    return model, build_optimizer(model, arguments.training, note=print)


def manager(yaml: str, plan: str) -> CheckpointManager:
    save = Path(yaml).parent / "saved" / plan.replace(" ", "")
    training = load_with_plugins(Path(yaml), [f"training.save={save}"]).arguments.training
    return CheckpointManager(save, training, context={}, note=print)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    moments = {name: full(tensor) for name, tensor in optimizer_tensors(model, optimizer).items()}
    return record_weights(model) | moments


def save_plans(yaml: str, ranks: int) -> dict[str, Any]:
    """Under every plan of so many ranks: a step with made-up gradients, a checkpoint, an exported folder."""
    found = {}
    for plan, (needed, words) in PLANS.items():
        if needed != ranks:
            continue
        model, optimizer = build(yaml, ranks, *words)
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = parameter.detach() * (number + 1)
        optimizer.step()
        manager(yaml, plan).save(1, model, optimizer, {})
        folder = Path(yaml).parent
        save_hf(model, folder / "exported" / plan, folder / "model", dtype=torch.float32)
        found[plan] = state_of(model, optimizer)
        destroy_parallel_state()
        found[f"{plan} from scratch"] = record_weights(build(yaml, ranks, *words, SCRATCH)[0])
        destroy_parallel_state()
    return found


def load_plans(yaml: str, ranks: int, saved_by: list[str]) -> dict[str, Any]:
    """Under every plan of so many ranks: what each of the others saved."""
    found = {}
    for plan, (needed, words) in PLANS.items():
        if needed != ranks:
            continue
        model, optimizer = build(yaml, ranks, *words)
        for other in saved_by:
            checkpoints = manager(yaml, other)
            latest = checkpoints.find_latest()
            assert latest is not None
            checkpoints.load(latest, model, optimizer)
            found[f"{other} → {plan}"] = state_of(model, optimizer)
        destroy_parallel_state()
    return found


@cache
def saved(yaml: str, ranks: int) -> dict[str, Any]:
    return run_ranks(ranks, save_plans, yaml, ranks)[0]


@cache
def loaded(yaml: str, ranks: int) -> dict[str, Any]:
    for plan in FEW:
        saved(yaml, PLANS[plan][0])
    return run_ranks(ranks, load_plans, yaml, ranks, FEW)[0]


FEW = [plan for plan, (ranks, _) in PLANS.items() if ranks <= 2]
"""Loaded here; all plans in `tests/fsdp/train/test_plan_matrix_checkpoints.py`."""


@pytest.mark.parametrize("loaded_by", FEW)
@pytest.mark.parametrize("saved_by", FEW)
def test_loaded_to_the_bit(saved_by: str, loaded_by: str, yaml: str) -> None:
    expected = saved(yaml, PLANS[saved_by][0])[saved_by]
    found = loaded(yaml, PLANS[loaded_by][0])[f"{saved_by} → {loaded_by}"]
    assert expected.keys() == found.keys() and any("exp_avg_sq" in name for name in expected)
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


@pytest.mark.parametrize(
    "plan", [plan if plan in FEW else pytest.param(plan, marks=pytest.mark.slow) for plan in PLANS]
)
def test_from_scratch_and_exported_to_the_bit(plan: str, yaml: str) -> None:
    scratch, alone = saved(yaml, PLANS[plan][0])[f"{plan} from scratch"], saved(yaml, 1)["1 from scratch"]
    assert scratch.keys() == alone.keys()
    for name, tensor in alone.items():
        assert torch.equal(tensor, scratch[name]), name
    weights = saved(yaml, PLANS[plan][0])[plan]
    with open_weights(Path(yaml).parent / "exported" / plan) as stored:
        exported = {name: tensor.read() for name, tensor in stored.items()}
    down = torch.stack([exported[f"model.layers.1.mlp.experts.{e}.down_proj.weight"] for e in range(8)])
    assert torch.equal(down, weights["model.layers.1.mlp.experts.down_proj"])
    assert torch.equal(exported["lm_head.weight"], weights["lm_head.weight"])
