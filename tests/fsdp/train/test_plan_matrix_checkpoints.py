"""Checkpoints across plans: what is saved under each plan is loaded under every one, weights and optimizer to the bit,
and the step after it is that of a run that was never interrupted in one process, in fp64.

Saving while a step is under way, averages and exported folders are tested with each mechanism.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_mm.fsdp.checkpoint.tree import optimizer_tensors
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.hooks.step_record import StepRecord, StepRecorder, full, of_all_stages, record_weights
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.train_engine import Hook, TrainEngine
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import compare_steps
from tests.helpers.plan_matrix import PLANS, REFUSED, TOLERANCE, Plan, words_of, yaml_of
from tests.helpers.runs import differing, tensors

pytestmark = pytest.mark.slow
ALONE = "one process"
NAMES = (
    *(ALONE, "fsdp2", "hsdp2×2", "tp2", "pp2 × vpp2 interleaved1f1b", "ring2", "fsdp2 × tp2"),
    *("ep2", "ep2 × efsdp2", "fsdp2 × ep2, copies", "pp2 × vpp2 × ep2"),
)
PLANS_HERE = {name: PLANS.get(name, Plan(1, 1, 1)) for name in NAMES}
FAMILIES = {family: [name for name in NAMES if (family, name) not in REFUSED] for family in ("text moe", "text")}
PAIRS = [(family, saved, loads) for family, names in FAMILIES.items() for loads in names for saved in names]


class Loaded(Hook):
    """What a run holds when it begins, whole, under the names of a checkpoint."""

    def __init__(self) -> None:
        self.tree: dict[str, torch.Tensor] = {}

    def on_train_begin(self, engine: TrainEngine) -> None:
        held = {f"model.{name}": tensor for name, tensor in record_weights(engine.model).items()}
        state = optimizer_tensors(engine.model, engine.optimizer)
        held |= {f"optimizer.{name}": full(tensor) for name, tensor in state.items()}
        self.tree = of_all_stages(held)


def folder_of(yaml: str, plan: str) -> Path:
    return Path(yaml).parent / "saved" / plan.replace(" ", "_")


def train_on(yaml: str, steps: int, words: list[str]) -> tuple[Loaded, list[StepRecord]]:
    loaded, recorder = Loaded(), StepRecorder()
    with keeping_double():
        Trainer(load_with_plugins(Path(yaml), words), TrainOptions(steps=steps), hooks=[loaded, recorder]).train()
    return loaded, recorder.steps


def save_cases(yaml: str, family: str, plans: list[str]) -> None:
    """On each rank: one step under each plan, and a checkpoint."""
    for plan in plans:
        train_on(yaml, 1, [*words_of(family, PLANS_HERE[plan]), f"training.save={folder_of(yaml, plan)}"])


def load_cases(yaml: str, family: str, plan: str) -> dict[str, dict[str, Any]]:
    """On each rank: saved by → what differs when it is loaded under a plan, and the step after it, which one rank
    tells."""
    found = {}
    for saved in FAMILIES[family]:
        folder = folder_of(yaml, saved)
        loaded, steps = train_on(yaml, 1, [*words_of(family, PLANS_HERE[plan]), f"training.load={folder}"])
        differ = differing(loaded.tree, tensors(folder, 1))
        found[saved] = {"differ": differ, "steps": steps if dist.get_rank() == 0 else []}
    return found


def uninterrupted(yaml: str, family: str) -> list[StepRecord]:
    return train_on(yaml, 2, words_of(family, PLANS_HERE[ALONE]))[1]


def plans_of(family: str, ranks: int) -> list[str]:
    return [name for name in FAMILIES[family] if PLANS_HERE[name].ranks == ranks]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoints"))


@cache
def saved_yaml(root: str, family: str) -> str:
    """The run's YAML, beside checkpoints of all plans."""
    yaml = yaml_of(root, family)
    for ranks in sorted({plan.ranks for plan in PLANS_HERE.values()}):
        run_ranks(ranks, save_cases, yaml, family, plans_of(family, ranks))
    return yaml


@cache
def loaded_by(root: str, family: str, plan: str) -> list[dict[str, dict[str, Any]]]:
    yaml = saved_yaml(root, family)
    return run_ranks(PLANS_HERE[plan].ranks, load_cases, yaml, family, plan)


@cache
def reference(root: str, family: str) -> list[StepRecord]:
    return run_ranks(1, uninterrupted, yaml_of(root, family), family)[0]


@pytest.mark.parametrize(("family", "saved", "loads"), PAIRS)
def test_loaded_to_the_bit_and_trained_on(family: str, saved: str, loads: str, root: str) -> None:
    found = [each[saved] for each in loaded_by(root, family, loads)]
    assert [each["differ"] for each in found] == [[]] * len(found)
    compare_steps(reference(root, family)[1:], found[0]["steps"], TOLERANCE)
