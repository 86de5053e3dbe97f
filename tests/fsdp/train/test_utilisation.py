"""FLOPs, MFU and other numbers of the log: the same step under every plan, packed or not, and what is made of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_mm.fsdp.tools.flops_tool.count import FlopCount, ModuleFlops
from mindspeed_mm.fsdp.tools.flops_tool.peaks import peak_tflops
from mindspeed_mm.fsdp.tools.flops_tool.units import WorkUnit
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.hooks.log import LogHook
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.run.utilisation import Utilisation
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.fsdp.utils import device
from tests.helpers.counted_flops import batched_product
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import lines, train
from tests.helpers.tiny_run import make_rows, make_tiny_run

ALONE = ("training.micro_batch_size=4", "training.gradient_accumulation_steps=2", "training.train_iters=2")
PLANS = {
    "fsdp2": ("training.micro_batch_size=2",),
    "tensor": ("parallel.tensor_parallel_size=2",),
    "ring": ("parallel.ring_attention_size=2",),
    "pipeline": ("parallel.pipeline_parallel_size=2",),
}


class Counts(Hook):
    """Keeps the FLOPs of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        self.steps.append(result.tally.flops)


class Silent(Trainer):
    def _build_hooks(self, *args: Any, **kwargs: Any) -> Any:
        return []


def flops_of(yaml: str, *words: str, packs: bool | None = None) -> list[dict[str, float]]:
    counts = Counts()
    Silent(load_with_plugins(Path(yaml), [*ALONE, *words]), TrainOptions(packs=packs), hooks=[counts]).train()
    return counts.steps


def all_plans(yaml: str) -> dict[str, list[dict[str, float]]]:
    return {name: flops_of(yaml, *words) for name, words in PLANS.items()}


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_run(tmp_path_factory.mktemp("run")))


def expect_the_same(found: list[dict[str, float]], alone: list[dict[str, float]]) -> None:
    assert [step.keys() for step in found] == [step.keys() for step in alone]
    for step, expected in zip(found, alone, strict=True):
        assert step == pytest.approx(expected, rel=1e-12)


def test_a_step_costs_the_same_packed(yaml: str) -> None:
    alone = flops_of(yaml)
    assert len(alone) == 2
    assert all(step["full"] > step["causal"] > 0 and step["recompute"] == 0 for step in alone)
    expect_the_same(flops_of(yaml, packs=True), alone)


@pytest.mark.slow
def test_a_step_costs_the_same_under_every_plan(yaml: str) -> None:
    alone = flops_of(yaml)
    for found in run_ranks(2, all_plans, yaml)[1].values():
        expect_the_same(found, alone)


def test_recomputation_is_work_of_the_hardware_alone(yaml: str) -> None:
    plain, again = flops_of(yaml), flops_of(yaml, "features.recompute=true")
    kept = flops_of(yaml, "features.recompute=true", "features.recompute_plan.mode=selective")
    assert [step["causal"] for step in plain] == [step["causal"] for step in again]
    assert all(0 < step["recompute"] < step["causal"] / 3 + 1 for step in again)
    assert [step["recompute"] for step in kept] == [0, 0]


def count() -> FlopCount:
    works = (
        ModuleFlops("layers.0", "linear", WorkUnit("text"), 1e9, 2, again=True),
        ModuleFlops("layers.0", "attention", WorkUnit("text", "text", "causal"), 1e6, 2, again=True),
    )
    return FlopCount(works, lambda batch: batch["lengths"])


def test_shares_of_all_devices() -> None:
    utilisation = Utilisation(count(), devices=4, peak_tflops=2.0, peak_source="")
    meter = utilisation.meter
    assert meter is not None
    step = meter([{"lengths": {"text": [1000, 3000]}}])
    assert step["causal"] == 3 * (4000 * 1e9 + (1000**2 + 3000**2) / 2 * 1e6)
    assert step["full"] == 3 * (4000 * 1e9 + (1000**2 + 3000**2) * 1e6)
    found = utilisation.metrics([step, step], seconds=10.0)
    whole = 10.0 * 4 * 2e12
    assert found["mfu"] == pytest.approx(2 * step["causal"] / whole)
    assert found["mfu_full"] == pytest.approx(2 * step["full"] / whole)
    assert found["hfu"] == pytest.approx(found["mfu"] * 4 / 3)
    assert found["tflops"] == pytest.approx(2 * step["causal"] / 10 / 4 / 1e12)


def test_without_a_peak_there_are_flops_and_no_shares() -> None:
    utilisation = Utilisation(count(), devices=1, peak_tflops=None, peak_source="a CPU, fp32")
    found = utilisation.metrics([{"causal": 1e12, "full": 2e12, "recompute": 0.0, "recompute_full": 0.0}], 2.0)
    assert found == {"tflops": 0.5, "tflops_full": 1.0}
    assert "tools.peak_tflops" in utilisation.describe()
    assert Utilisation(None, 1, 989, "").metrics([{}], 1.0) == {}


def test_what_a_run_writes(yaml: str, tmp_path: Path) -> None:
    train(yaml, tmp_path / "out", *ALONE, "tools.peak_tflops=0.25", "features.recompute=true")
    record = lines(tmp_path / "out" / "metrics.jsonl")[-1]
    assert record["mfu"] == pytest.approx(record["tflops"] / 0.25)
    assert record["mfu"] < record["mfu_full"] < record["hfu_full"]
    assert record["mfu"] < record["hfu"]
    text = (tmp_path / "out" / "log" / "train.log").read_text()
    assert "flops  MFU of 1 × 0.25 TFLOP/s (tools.peak_tflops)" in text


class Written:
    """Stands for the run's record and for its progress."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    @property
    def progress(self) -> Written:
        return self

    def metrics(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def step(self, *_: Any) -> None:
        pass


def result(step: int, seconds: float, data_seconds: float) -> StepResult:
    tally = SimpleNamespace(tokens=100, slots=0, samples=1, label_tokens=50, flops={})
    return StepResult(step, {"loss": 1.0}, 1.0, 0.1, tally, seconds, data_seconds)  # type: ignore[arg-type]


def test_the_share_of_waiting_is_of_the_window_since_the_last_line() -> None:
    written: Any = Written()
    hook = LogHook(written, log_interval=3)
    engine: Any = SimpleNamespace(iteration=0, last_step=6, stopping=False, consumed_samples=0)
    engine.schedule = SimpleNamespace(total_steps=6)
    hook.on_train_begin(engine)
    for step, seconds, waited in [(1, 4.0, 3.0), (2, 1.0, 0.5), (3, 3.0, 0.5), (4, 1, 0), (5, 1, 0), (6, 2, 0)]:
        hook.on_step_end(engine, result(step, seconds, waited))
    assert [record["step"] for record in written.records] == [1, 3, 6]
    assert [record["data_share"] for record in written.records] == [0.75, 0.25, 0.0]
    assert [record["tokens_per_s"] for record in written.records] == [25, 50, 75]


def test_peak_memory_begins_anew_with_each_line() -> None:
    held = {"allocated": 5, "reserved": 9}

    def reset() -> None:
        held.update(allocated=1, reserved=2)

    accelerator = SimpleNamespace(
        max_memory_allocated=lambda: held["allocated"],
        max_memory_reserved=lambda: held["reserved"],
        reset_peak_memory_stats=reset,
    )
    with (
        mock.patch.object(device, "get_device_type", lambda: "cuda"),
        mock.patch.object(torch, "accelerator", accelerator),
    ):
        assert device.take_peak_memory() == (5, 9)
        assert device.take_peak_memory() == (1, 2)
    assert device.take_peak_memory().reserved is None
    assert device.take_peak_memory().allocated > 2**20


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989), ("NVIDIA H100 PCIe", "bf16", 756), ("NVIDIA H20", "bf16", 148),
        ("NVIDIA H200", "fp8", 1979), ("NVIDIA A100-SXM4-80GB", "tf32", 156), ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362), ("NVIDIA GeForce RTX 4090", "fp16", 165.2), ("Tesla V100-SXM2", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "fp8", None), ("Ascend910B3", "bf16", 313), ("Ascend910_9392", "bf16", 376),
        ("NVIDIA A1000", "bf16", None), ("NVIDIA H2000", "bf16", None), ("nobody's", "bf16", None),
        ("h200", "bf16", 989),
    ],
)  # fmt: skip
def test_published_peaks(name: str, precision: str, peak: float | None) -> None:
    assert peak_tflops(name, precision) == peak


def test_a_meter_asks_for_lengths_alone() -> None:
    """A call costs the host microseconds and the device nothing: its units are added up beforehand."""
    many = FlopCount(count().works * 500, lambda batch: batch["lengths"])
    once = count().meter()([{"lengths": {"text": [10]}}])
    found = many.meter()([{"lengths": {"text": [10]}}])
    assert all(math.isclose(found[name], 500 * value) for name, value in once.items())
    assert json.dumps(found)


@pytest.mark.parametrize(
    "words",
    [(), ("model.freeze=[model.visual]",), ("training.lora.enable=true",), ("features.recompute=true",)],
    ids=["all", "frozen tower", "adapters", "recompute"],
)
def test_the_log_counts_what_torch_counts_in_a_step(tmp_path: Path, words: tuple[str, ...]) -> None:
    """In the real trainer, head on labelled rows, one sample with pictures a micro-batch: no padding, no idle tower.
    torch stops a recomputation at the last result that is needed, before a block's last product; we count all of it."""
    make_rows(tmp_path, images=(1, 2))
    yaml = str(make_tiny_run(tmp_path))
    seen: list[int] = []
    train_step = TrainEngine.train_step

    def counted(engine: TrainEngine, *args: Any, **kwargs: Any) -> StepResult:
        formulas = {torch.ops.aten.bmm: batched_product}
        with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            result = train_step(engine, *args, **kwargs)
        seen.append(counter.get_total_flops())
        return result

    alone = (
        "model.attn_implementation=eager",
        "data.dataloader_param.collate_param.pad_to_multiple_of=1",
        "training.micro_batch_size=1",
        "training.gradient_accumulation_steps=3",
    )
    with mock.patch.object(TrainEngine, "train_step", counted):
        steps = flops_of(yaml, *alone, *words)
    assert len(seen) == 2
    for step, expected in zip(steps, seen, strict=True):
        if "features.recompute=true" in words:
            assert step["full"] < expected < step["full"] + step["recompute_full"]
        else:
            assert step["full"] == expected
