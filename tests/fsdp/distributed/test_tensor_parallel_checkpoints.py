"""What is saved under fsdp × tp is loaded by one process, and the other way round, to the bit; so are weights from
scratch and exported folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.fsdp.checkpoint.hf import save_hf
from mindspeed_mm.fsdp.checkpoint.manager import CheckpointManager
from mindspeed_mm.fsdp.checkpoint.tree import optimizer_tensors
from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from tests.fsdp.distributed.tensor_parallel_step import SEQUENCE, Case, adamw, build, run_steps
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import compare_steps, full, record_weights
from tests.helpers.tiny_models import make_tiny_qwen3_vl

pytestmark = pytest.mark.slow
SPLIT = Case("vlm", SEQUENCE)
ALONE = Case("vlm", {"tensor_parallel_size": 1})
SCRATCH = {"split": Case("vlm", scratch=True), "alone": Case("vlm", {"tensor_parallel_size": 1}, scratch=True)}


def manager(save: str) -> CheckpointManager:
    return CheckpointManager(Path(save), TrainingArguments(save=save), context={}, note=print)


def case_here() -> tuple[str, Case]:
    return ("alone", ALONE) if dist.get_world_size() == 1 else ("split", SPLIT)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    moments = {name: full(tensor) for name, tensor in optimizer_tensors(model, optimizer).items()}
    return record_weights(model) | moments


def train_and_save(folder: str, root: str) -> dict[str, Any]:
    """Two steps, a checkpoint, an exported folder, a third step; weights from scratch of another model."""
    name, case = case_here()
    built = build(case, folder)
    optimizer = adamw(built.model)
    run_steps(case, built, 2, optimizer=optimizer)
    manager(f"{root}/{name}").save(2, built.model, optimizer, {})
    saved = state_of(built.model, optimizer)
    save_hf(built.model, Path(root) / f"{name}_hf", Path(folder), dtype=torch.float64)
    third = run_steps(case, built, 1, optimizer=optimizer)
    destroy_parallel_state()
    scratch = record_weights(build(SCRATCH[name], folder).model)
    destroy_parallel_state()
    return {"saved": saved, "third": third, "scratch": scratch}


def load_and_train(folder: str, root: str) -> dict[str, Any]:
    """What the other plan saved, and a third step from there."""
    name, case = case_here()
    built = build(case, folder)
    optimizer = adamw(built.model)
    checkpoints = manager(f"{root}/{'alone' if name == 'split' else 'split'}")
    latest = checkpoints.find_latest()
    assert latest is not None
    checkpoints.load(latest, built.model, optimizer)
    loaded = state_of(built.model, optimizer)
    third = run_steps(case, built, 1, optimizer=optimizer)
    destroy_parallel_state()
    return {"loaded": loaded, "third": third}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("checkpoints")
    folder = str(make_tiny_qwen3_vl(root / "vlm"))
    found = {}
    for function, what in ((train_and_save, "trained"), (load_and_train, "resumed")):
        for ranks, name in ((4, "split"), (1, "alone")):
            found[f"{name} {what}"] = run_ranks(ranks, function, folder, str(root))[0]
    return found | {"root": {"path": str(root)}}


@pytest.mark.parametrize(("saved_by", "loaded_by"), [("split", "alone"), ("alone", "split")])
def test_loaded_to_the_bit_and_trained_on(saved_by, loaded_by, results):
    saved, loaded = results[f"{saved_by} trained"], results[f"{loaded_by} resumed"]
    assert saved["saved"].keys() == loaded["loaded"].keys()
    for name, tensor in saved["saved"].items():
        assert torch.equal(tensor, loaded["loaded"][name]), name
    compare_steps(saved["third"], loaded["third"], 1e-9)


def test_from_scratch_to_the_bit(results):
    split, alone = results["split trained"]["scratch"], results["alone trained"]["scratch"]
    assert split.keys() == alone.keys()
    for name, tensor in alone.items():
        assert torch.equal(tensor, split[name]), name
    assert len({tensor.flatten()[0].item() for name, tensor in alone.items() if "proj.weight" in name}) > 1


def test_exported_folder_holds_the_whole_model(results):
    saved = results["split trained"]["saved"]
    with open_weights(Path(results["root"]["path"]) / "split_hf") as stored:
        whole = {name: tensor.read() for name, tensor in stored.items()}
    assert len(whole) > 30
    for name, tensor in whole.items():
        assert torch.equal(tensor, saved[name]), name
