"""Pipeline parallelism through the trainer equals one process, in fp64: every schedule, uneven rows, tied and untied
ends, a vision-language model cut inside its DeepStack layers, a generator, adapters, and the products with sharding and
tensor parallelism."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.hooks.step_record import StepRecord, StepRecorder
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine
from tests.helpers import tiny_models
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, compare_steps
from tests.helpers.planned_steps import Quiet
from tests.helpers.schedules import ZBV, case, is_possible
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_generators import make_tiny_wan
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_moe, make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_rows, make_tiny_run

TOLERANCE = 1e-9
GLOBAL_BATCH = 8
PP2, PP4 = "parallel.pipeline_parallel_size=2", "parallel.pipeline_parallel_size=4"
TP = "parallel.tensor_parallel_size=2"
GPIPE = "parallel.pp_plan.schedule=gpipe"
LOOPS = ("parallel.pp_plan.schedule=interleaved1f1b", "parallel.pp_plan.virtual_stages=2")
TEXT, LAYERS = "model.layers", "model.language_model.layers"


SEQUENCE = 'parallel.tp_plan.sequence_parallel=["model.layers.{*}.*layernorm", "model.norm"]'


def splits(*names: str) -> str:
    return f"parallel.pp_plan.split_points=[{', '.join(names)}]"


CASES = {  # name → (model, ranks, data ranks, accumulation, overrides)
    "text 1f1b": ("text", 2, 1, 4, (PP2,)),
    "text gpipe, two rounds": ("text", 2, 1, 4, (PP2, GPIPE, "parallel.pp_plan.micro_batches=2")),
    "text interleaved": ("text", 2, 1, 4, (PP2, *LOOPS)),
    "tied zbv": ("tied", 2, 1, 4, (PP2, ZBV)),
    "vlm 1f1b, recompute": ("vlm", 2, 1, 4, (PP2, "features.recompute=true")),
    "vlm, tower alone": ("vlm", 2, 1, 2, (PP2, GPIPE, splits(f"{LAYERS}.0"))),
    "vlm zbv": ("vlm", 2, 1, 4, (PP2, ZBV)),
    "t2v 1f1b": ("t2v", 2, 1, 2, (PP2,)),
    "vlm pp2 × fsdp2": ("vlm", 4, 2, 2, (PP2,)),
}
SLOW = {
    "text zbv": ("text", 2, 1, 4, (PP2, ZBV)),
    "vlm interleaved": ("vlm", 2, 1, 4, (PP2, *LOOPS)),
    "t2v zbv": ("t2v", 2, 1, 4, (PP2, ZBV)),
    "tied 1f1b, no layer behind": ("tied", 2, 1, 2, (PP2, splits("model.norm"))),
    "tied pp2 × fsdp2 interleaved": ("tied", 4, 2, 2, (PP2, *LOOPS)),
    "vlm lora": ("vlm lora", 2, 1, 2, (PP2,)),
    "t2v lora interleaved": ("t2v lora", 2, 1, 4, (PP2, *LOOPS)),
    "i2v 1f1b": ("i2v", 2, 1, 2, (PP2,)),
    "frozen first stage zbv": ("text", 2, 1, 4, (PP2, ZBV, "model.freeze=[model.embed_tokens, 'model.layers.{0}']")),
    "vlm pp2 × fsdp2 zbv": ("vlm", 4, 2, 2, (PP2, ZBV)),
    "vlm pp2 × hsdp": ("vlm", 4, 2, 2, (PP2, "parallel.fully_shard_parallel_size=1")),
    "vlm pp4": ("vlm", 4, 1, 4, (PP4,)),
    "tied pp4 zbv": ("deep", 4, 1, 8, (PP4, ZBV)),
    "tied pp2 × tp2": ("tied", 4, 1, 4, (PP2, TP)),
    "text pp2 × tp2, sequence": ("text", 4, 1, 4, (PP2, TP, SEQUENCE)),
    "moe 1f1b": ("moe", 2, 1, 4, (PP2,)),
    "moe zbv": ("moe", 2, 1, 4, (PP2, ZBV)),
    "vlm pp2 × tp2 interleaved": ("vlm", 4, 1, 4, (PP2, TP, *LOOPS)),
    "vlm pp2 × ring2": ("vlm", 4, 1, 2, (PP2, "parallel.ring_attention_size=2")),
    "vlm pp2 × ulysses2": ("vlm", 4, 1, 2, (PP2, "parallel.ulysses_parallel_size=2")),
    "t2v pp2 × tp2": ("t2v", 4, 1, 2, (PP2, TP)),
    "tied pp2 × tp2 × fsdp2": ("tied", 8, 2, 2, (PP2, TP)),
}
FROZEN = {"frozen first stage zbv"}
"""Compared with a reference of their own."""
FAULTS = {
    "norm of one stage": "text 1f1b",
    "tied gradient not summed": "tied zbv",
    "a denominator for each micro-batch": "text gpipe, two rounds",
}

FP64 = {
    "parallel": {"fsdp_plan": {"param_dtype": "fp64"}},
    "training": {"train_iters": 2, "clip_grad": 0.5, "weight_decay": 0.1, "adam_fused": False},
}


Recorded = tuple[list[StepRecord], list[float]]
"""Steps, and the losses of their batches after each."""


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, str], ...]:
    folder = tmp_path_factory.mktemp("stages")
    make_tiny_qwen3(folder / "text" / "model", num_hidden_layers=4)
    make_tiny_qwen3(folder / "tied" / "model", num_hidden_layers=4, tie=True)
    make_tiny_qwen3_moe(folder / "moe" / "model", num_hidden_layers=4)
    make_tiny_qwen3(folder / "deep" / "model", num_hidden_layers=8, tie=True)
    with mock.patch.dict(tiny_models._VISION, {"deepstack_visual_indexes": [0, 1]}):
        make_tiny_qwen3_vl(folder / "vlm" / "model", num_hidden_layers=4)
    made = {name: make_tiny_run(folder / name, **FP64) for name in ("vlm",)}
    made |= {name: make_text_run(folder / name) for name in ("text", "tied", "deep", "moe")}
    for task in ("t2v", "i2v"):
        make_tiny_wan(folder / task / "model", task=task, num_layers=4)
        made[task] = make_tiny_generator_run(folder / task, task, **FP64)
    return tuple((name, str(path)) for name, path in made.items())


def make_text_run(folder: Path) -> Path:
    """Conversations without images, of uneven lengths."""
    make_rows(folder, images=(0,))
    return make_tiny_run(folder, **FP64)


def run_of(model: str, yamls: dict[str, str], data_ranks: int, accumulation: int, *words: str) -> tuple[str, list[str]]:
    micro = GLOBAL_BATCH // data_ranks // accumulation
    sizes = [f"training.micro_batch_size={micro}", f"training.gradient_accumulation_steps={accumulation}"]
    family, *adapters = model.split()
    return yamls[family], [*sizes, *words, *(["training.lora.enable=true"] if adapters else [])]


class Evaluation(Hook):
    """The loss of each step's batch once more, after the update. What it leaves behind the next step would show."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_begin(self, engine: TrainEngine) -> None:
        real = engine.train_step

        def watched(micro_batches: Any, *args: Any, **kwargs: Any) -> Any:
            self._batches = micro_batches
            return real(micro_batches, *args, **kwargs)

        engine.train_step = watched  # type: ignore[method-assign]

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        self.losses.append(engine.evaluate([self._batches])["loss"])


def run_plan(yaml: str, overrides: list[str]) -> Recorded:
    """Two optimizer steps on this rank through the real trainer, and what each left for evaluation."""
    recorder, evaluation = StepRecorder(), Evaluation()
    Quiet(load_with_plugins(Path(yaml), overrides), hooks=[recorder, evaluation]).train()
    return recorder.steps, evaluation.losses


def run_cases(ranks: int, yamls: dict[str, str], slow: bool) -> dict[str, Recorded]:
    """Every case that takes this many ranks; 1: the references."""
    cases = SLOW if slow else CASES
    measured = {}
    with mock.patch.object(torch.Tensor, "float", float_unless_double):
        if ranks == 1:
            return references(cases, yamls)
        for name, (model, needed, data_ranks, accumulation, words) in cases.items():
            if needed == ranks and is_possible(words):
                measured[name] = run_plan(*run_of(model, yamls, data_ranks, accumulation, *words))
        for fault, name in FAULTS.items():
            if not slow and cases[name][1] == ranks and is_possible(cases[name][-1]):
                model, _, data_ranks, accumulation, words = cases[name]
                with planted(fault):
                    measured[fault] = run_plan(*run_of(model, yamls, data_ranks, accumulation, *words))
    return measured


def references(
    cases: dict[str, tuple[str, int, int, int, tuple[str, ...]]], yamls: dict[str, str]
) -> dict[str, Recorded]:
    found = {model: run_plan(*run_of(model, yamls, 1, 1)) for model in {case[0] for case in cases.values()}}
    for name in FROZEN & cases.keys():
        found[name] = run_plan(*run_of(cases[name][0], yamls, 1, 1, cases[name][-1][-1]))
    return found


def planted(fault: str) -> object:
    """The fault as a patch of the one function that it would be a bug in."""
    from mindspeed_mm.fsdp.distributed.pipeline.stage import StageModule
    from mindspeed_mm.fsdp.distributed.pipeline.tied_ends import TiedEnds
    from mindspeed_mm.fsdp.train import train_engine

    if fault == "norm of one stage":
        real_norm = train_engine.grad_norm
        return mock.patch.object(train_engine, "grad_norm", lambda parameters, stages=None: real_norm(parameters))
    if fault == "tied gradient not summed":
        return mock.patch.object(TiedEnds, "sum_gradients", lambda ends: None)
    real_loss = StageModule._loss

    def averaged(stage: StageModule, terms: dict[str, torch.Tensor]) -> torch.Tensor:
        assert stage.work is not None
        return real_loss(stage, {name: value / len(stage.work.batches) for name, value in terms.items()})

    return mock.patch.object(StageModule, "_loss", averaged)


def float_unless_double(tensor: torch.Tensor) -> torch.Tensor:
    """Models round to fp32 here and there, which would be all that could be seen in fp64."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


@cache
def results_of(ranks: int, yamls: tuple[tuple[str, str], ...], slow: bool = False) -> list[dict[str, Recorded]]:
    return run_ranks(ranks, run_cases, ranks, dict(yamls), slow, timeout_s=400)


def check(name: str, yamls: tuple[tuple[str, str], ...], slow: bool) -> None:
    model, ranks, *_ = (SLOW if slow else CASES)[name]
    expected = results_of(1, yamls, slow)[0][name if name in FROZEN else model]
    for measured in results_of(ranks, yamls, slow):
        compare_steps(expected[0], measured[name][0], TOLERANCE)
        assert measured[name][1] == pytest.approx(expected[1], rel=TOLERANCE)


@pytest.mark.parametrize("name", [case(name, CASES[name][-1]) for name in CASES])
def test_stages_equal_one_process(name: str, yamls: tuple[tuple[str, str], ...]) -> None:
    check(name, yamls, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", [case(name, SLOW[name][-1]) for name in SLOW])
def test_more_stages_equal_one_process(name: str, yamls: tuple[tuple[str, str], ...]) -> None:
    check(name, yamls, slow=True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [case(fault, CASES[name][-1]) for fault, name in FAULTS.items()])
def test_planted_fault_is_found(fault: str, yamls: tuple[tuple[str, str], ...]) -> None:
    model, ranks, *_ = CASES[FAULTS[fault]]
    steps, _ = results_of(ranks, yamls)[0][fault]
    with pytest.raises(ParityError):
        compare_steps(results_of(1, yamls)[0][model][0], steps, TOLERANCE)
