"""Pipeline parallelism through the trainer equals one process, in fp64: every schedule, uneven rows, tied and untied
ends, a vision-language model cut inside its DeepStack layers, a generator, adapters, and the products with sharding and
tensor parallelism."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_mm.fsdp.distributed.pipeline.apply import TiedEnds
from mindspeed_mm.fsdp.distributed.pipeline.stage import StageModule
from mindspeed_mm.fsdp.train import train_engine
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.hooks.step_record import StepRecord, StepRecorder
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine
from tests.helpers import tiny_models
from tests.helpers.parity_runs import Case, Fault, ParityRuns
from tests.helpers.plan_matrix import FP64, GPIPE
from tests.helpers.planned_steps import Quiet
from tests.helpers.schedules import ZBV
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_generators import make_tiny_wan
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_moe, make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_rows, make_tiny_run

PP2, PP4 = "parallel.pipeline_parallel_size=2", "parallel.pipeline_parallel_size=4"
TP = "parallel.tensor_parallel_size=2"
LOOPS = ("parallel.pp_plan.schedule=interleaved1f1b", "parallel.pp_plan.virtual_stages=2")
TEXT, LAYERS = "model.layers", "model.language_model.layers"


SEQUENCE = 'parallel.tp_plan.sequence_parallel=["model.layers.{*}.*layernorm", "model.norm"]'


def splits(*names: str) -> str:
    return f"parallel.pp_plan.split_points=[{', '.join(names)}]"


CASES = {
    "text 1f1b": Case("text", 2, 1, 4, (PP2,)),
    "text gpipe, two rounds": Case("text", 2, 1, 4, (PP2, GPIPE, "parallel.pp_plan.micro_batches=2")),
    "tied zbv": Case("tied", 2, 1, 4, (PP2, ZBV)),
    "vlm, tower alone": Case("vlm", 2, 1, 2, (PP2, GPIPE, splits(f"{LAYERS}.0"))),
    "vlm zbv": Case("vlm", 2, 1, 4, (PP2, ZBV)),
    "t2v 1f1b": Case("t2v", 2, 1, 2, (PP2,)),
    "vlm pp2 × fsdp2": Case("vlm", 4, 2, 2, (PP2,)),
}
SLOW = {
    "vlm 1f1b, recompute": Case("vlm", 2, 1, 4, (PP2, "features.recompute=true")),
    "text interleaved": Case("text", 2, 1, 4, (PP2, *LOOPS)),
    "text zbv": Case("text", 2, 1, 4, (PP2, ZBV)),
    "vlm interleaved": Case("vlm", 2, 1, 4, (PP2, *LOOPS)),
    "t2v zbv": Case("t2v", 2, 1, 4, (PP2, ZBV)),
    "tied 1f1b, no layer behind": Case("tied", 2, 1, 2, (PP2, splits("model.norm"))),
    "tied pp2 × fsdp2 interleaved": Case("tied", 4, 2, 2, (PP2, *LOOPS)),
    "vlm lora": Case("vlm lora", 2, 1, 2, (PP2,)),
    "t2v lora interleaved": Case("t2v lora", 2, 1, 4, (PP2, *LOOPS)),
    "i2v 1f1b": Case("i2v", 2, 1, 2, (PP2,)),
    "frozen first stage zbv": Case("text frozen", 2, 1, 4, (PP2, ZBV)),
    "vlm pp2 × fsdp2 zbv": Case("vlm", 4, 2, 2, (PP2, ZBV)),
    "vlm pp2 × hsdp": Case("vlm", 4, 2, 2, (PP2, "parallel.fully_shard_parallel_size=1")),
    "vlm pp4": Case("vlm", 4, 1, 4, (PP4,)),
    "tied pp4 zbv": Case("deep", 4, 1, 8, (PP4, ZBV)),
    "tied pp2 × tp2": Case("tied", 4, 1, 4, (PP2, TP)),
    "text pp2 × tp2, sequence": Case("text", 4, 1, 4, (PP2, TP, SEQUENCE)),
    "moe 1f1b": Case("moe", 2, 1, 4, (PP2,)),
    "moe zbv": Case("moe", 2, 1, 4, (PP2, ZBV)),
    "vlm pp2 × tp2 interleaved": Case("vlm", 4, 1, 4, (PP2, TP, *LOOPS)),
    "vlm pp2 × ring2": Case("vlm", 4, 1, 2, (PP2, "parallel.ring_attention_size=2")),
    "vlm pp2 × ulysses2": Case("vlm", 4, 1, 2, (PP2, "parallel.ulysses_parallel_size=2")),
    "t2v pp2 × tp2": Case("t2v", 4, 1, 2, (PP2, TP)),
    "tied pp2 × tp2 × fsdp2": Case("tied", 8, 2, 2, (PP2, TP)),
}


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
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
    return {name: str(path) for name, path in made.items()}


def make_text_run(folder: Path) -> Path:
    """Conversations without images, of uneven lengths."""
    make_rows(folder, images=(0,))
    return make_tiny_run(folder, **FP64)


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
        self.losses.append(engine.validate([self._batches])["loss"])


def train_and_evaluate(yaml: str, words: list[str]) -> list[StepRecord]:
    """Two optimizer steps on this rank through the real trainer, and what each left for evaluation."""
    recorder, evaluation = StepRecorder(), Evaluation()
    Quiet(load_with_plugins(Path(yaml), words), hooks=[recorder, evaluation]).train()
    for step, loss in zip(recorder.steps, evaluation.losses, strict=True):
        step["weights"]["the loss of the batch after the step"] = torch.tensor(loss, dtype=torch.float64)
    return recorder.steps


def norm_of_one_stage() -> AbstractContextManager[Any]:
    real = train_engine.grad_norm
    return mock.patch.object(train_engine, "grad_norm", lambda parameters, stages=None: real(parameters))


def tied_gradient_not_summed() -> AbstractContextManager[Any]:
    return mock.patch.object(TiedEnds, "sum_gradients", lambda ends: None)


def averaged_loss() -> AbstractContextManager[Any]:
    real = StageModule._loss

    def averaged(stage: StageModule, terms: dict[str, torch.Tensor]) -> torch.Tensor:
        assert stage.work is not None
        return real(stage, {name: value / len(stage.work.batches) for name, value in terms.items()})

    return mock.patch.object(StageModule, "_loss", averaged)


RUNS = ParityRuns(
    __file__,
    CASES,
    SLOW,
    slow_faults={
        "norm of one stage": Fault("text 1f1b", norm_of_one_stage),
        "tied gradient not summed": Fault("tied zbv", tied_gradient_not_summed),
        "a denominator for each micro-batch": Fault("text gpipe, two rounds", averaged_loss),
    },
    kinds={
        "lora": ("training.lora.enable=true",),
        "frozen": ("model.freeze=[model.embed_tokens, 'model.layers.{0}']",),
    },
    steps=train_and_evaluate,
)


@pytest.mark.parametrize("name", RUNS.case_params())
def test_stages_equal_one_process(name: str, yamls: dict[str, str]) -> None:
    RUNS.check(name, yamls)


@pytest.mark.parametrize("fault", RUNS.fault_params())
def test_planted_fault_is_found(fault: str, yamls: dict[str, str]) -> None:
    RUNS.check_fault(fault, yamls)
