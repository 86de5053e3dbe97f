"""Checkpoints of stages: resumed equals uninterrupted, and what one plan saved any other loads, to the bit: weights,
optimizer and average. Folders that a run exports while it trains hold all stages."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.fsdp.checkpoint.tree import average_tensors, named_copies, optimizer_tensors
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.hooks.step_record import full, of_all_stages, record_weights
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.train_engine import Hook, TrainEngine
from mindspeed_mm.fsdp.train.trainer import Trainer
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import differing, tensors
from tests.helpers.schedules import HAS_ZBV, ZBV
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_run import make_rows, make_tiny_run

PP2 = "parallel.pipeline_parallel_size=2"
ACCUMULATED = ("training.micro_batch_size=2", "training.gradient_accumulation_steps=4")
SHARED = ("training.micro_batch_size=1", "training.gradient_accumulation_steps=4")
LOOPS = ("parallel.pp_plan.schedule=interleaved1f1b", "parallel.pp_plan.virtual_stages=2")
PLANS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process": (1, ACCUMULATED),
    "fsdp2": (2, SHARED),
    "pp2": (2, (PP2, *ACCUMULATED)),
    "pp2 zbv": (2, (PP2, ZBV, *ACCUMULATED)),
    "pp2 × vpp2": (2, (PP2, *LOOPS, *ACCUMULATED)),
    "pp2 × fsdp2": (4, (PP2, *SHARED)),
}
TWO_CHUNKS = "pp2 zbv" if HAS_ZBV else "pp2 × vpp2"
PAIRS = [(TWO_CHUNKS, "one process"), ("pp2", "pp2 × vpp2")]
SLOW_PAIRS = [
    (TWO_CHUNKS, "fsdp2"),
    ("one process", TWO_CHUNKS),
    ("one process", "pp2 × vpp2"),
    ("fsdp2", "pp2"),
    ("pp2 × fsdp2", TWO_CHUNKS),
    ("pp2 × vpp2", "pp2 × fsdp2"),
    ("pp2 × fsdp2", "one process"),
]


class Loaded(Hook):
    """What a run holds when it begins, whole, under the names of a checkpoint."""

    def __init__(self) -> None:
        self.tree: dict[str, torch.Tensor] = {}
        self.copies_differ: list[str] = []

    def on_train_begin(self, engine: TrainEngine) -> None:
        held = {f"model.{name}": tensor for name, tensor in record_weights(engine.model).items()}
        state = optimizer_tensors(engine.model, engine.optimizer)
        held |= {f"optimizer.{name}": full(tensor) for name, tensor in state.items()}
        assert engine.ema is not None
        held |= {f"ema.{name}": full(tensor) for name, tensor in average_tensors(engine.ema).items()}
        self.tree = of_all_stages(held)
        moments = of_all_stages(
            {
                f"optimizer.state.{copy}.{key}": full(value)
                for copy, parameter in named_copies(engine.model).items()
                for key, value in engine.optimizer.state[parameter].items()
            }
        )
        first = {name.replace("lm_head", "model.embed_tokens"): tensor for name, tensor in moments.items()}
        self.copies_differ = [name for name, tensor in first.items() if not torch.equal(tensor, self.tree[name])]


def run(yaml: str, steps: int, words: tuple[str, ...]) -> dict[str, Any]:
    """Train up to so many more steps; returns what the run held when it began."""
    loaded = Loaded()
    Trainer(load_with_plugins(Path(yaml), list(words)), TrainOptions(steps=steps), hooks=[loaded]).train()
    return {"tree": loaded.tree, "copies differ": loaded.copies_differ}


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("stages")
    make_tiny_qwen3(folder / "model", num_hidden_layers=4, tie=True, attention_dropout=0.1)
    make_rows(folder, images=(0,))
    training = {"train_iters": 4, "save_interval": 2, "save_format": "hf", "ema": {"enable": True}}
    return str(make_tiny_run(folder, training=training))


@cache
def saved_by(plan: str, yaml: str) -> Path:
    """Two steps."""
    ranks, words = PLANS[plan]
    save = Path(yaml).parent / plan.replace(" ", "_")
    run_ranks(ranks, run, yaml, 2, (*words, f"training.save={save}"))
    return save


def check_pair(saved: str, loads: str, yaml: str) -> None:
    ranks, words = PLANS[loads]
    save = saved_by(saved, yaml)
    for found in run_ranks(ranks, run, yaml, 1, (*words, f"training.load={save}")):
        assert differing(found["tree"], tensors(save, 2)) == []
        assert found["copies differ"] == []


@pytest.mark.parametrize(("saved", "loads"), PAIRS)
def test_any_plan_loads_it_to_the_bit(saved: str, loads: str, yaml: str) -> None:
    check_pair(saved, loads, yaml)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loads"), SLOW_PAIRS)
def test_more_plans_load_it_to_the_bit(saved: str, loads: str, yaml: str) -> None:
    check_pair(saved, loads, yaml)


@pytest.mark.parametrize("plan", [TWO_CHUNKS, pytest.param("pp2 × fsdp2", marks=pytest.mark.slow)])
def test_resumed_equals_uninterrupted(plan: str, yaml: str, tmp_path: Path) -> None:
    ranks, words = PLANS[plan]
    save = saved_by(plan, yaml)
    run_ranks(ranks, run, yaml, 4, (*words, f"training.save={tmp_path}"))
    assert differing(tensors(tmp_path, 2), tensors(save, 2)) == []
    resumed = tmp_path / "resumed"
    run_ranks(ranks, run, yaml, 2, (*words, f"training.load={save}", f"training.save={resumed}"))
    assert differing(tensors(resumed, 4), tensors(tmp_path, 4)) == []


def test_an_exported_folder_holds_the_average_of_all_stages(yaml: str) -> None:
    save = saved_by(TWO_CHUNKS, yaml)
    average = {name.removeprefix("ema."): t for name, t in tensors(save, 2).items() if name.startswith("ema.")}
    with open_weights(save / "hf" / "iter_0000002") as stored:
        assert differing({name: tensor.read() for name, tensor in stored.items()}, average) == []


@pytest.mark.slow
def test_weights_from_scratch_are_those_of_one_process(yaml: str) -> None:
    trees = []
    for plan in ("one process", TWO_CHUNKS, "pp2 × fsdp2"):
        ranks, words = PLANS[plan]
        trees.append(run_ranks(ranks, run, yaml, 1, (*words, "model.train_from_scratch=true"))[0]["tree"])
    for tree in trees[1:]:
        assert differing(tree, trees[0]) == []
