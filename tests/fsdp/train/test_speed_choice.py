"""What `auto` chooses, from the YAML to the log: `mm check` and the run name it, a run that goes on from an older one
keeps its bits, and launch scripts keep their own defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.fsdp.features.speed.choice import Machine
from mindspeed_mm.fsdp.ops import layer_operators
from mindspeed_mm.fsdp.ops.compiled_calls import CountedBackend
from mindspeed_mm.provider.translate import from_flags
from tests.helpers.runs import differing, lines, losses, mm, tensors, train
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_run import make_rows, make_tiny_run

HOPPER = Machine("cuda", frozenset({"triton"}), (9, 0))
LONG = {"train_iters": 100}
STEPS = 3


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    make_tiny_qwen3(tmp_path / "model")
    make_rows(tmp_path, images=(0,))
    return make_tiny_run(tmp_path, training=LONG)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is taken for one with CUDA and triton; graphs run as they were traced."""
    torch._dynamo.reset()
    monkeypatch.setattr(Machine, "here", classmethod(lambda _cls: HOPPER))
    monkeypatch.setattr(CountedBackend, "_compile", lambda _self, graph, _inputs: graph.forward)


def test_a_cpu_computes_by_plain_operations_and_says_so(yaml: Path) -> None:
    said = mm("check", yaml)
    assert said.out.count("off (a CPU gains little by it, and its runs keep their bits)") == 2
    told = json.loads(mm("check", yaml, "--json").out)["speed"]
    assert [line.partition(":")[0] for line in told] == ["fused kernels", "compiled blocks"]


def test_auto_on_a_cpu_is_off_to_the_bit(yaml: Path, tmp_path: Path) -> None:
    train(yaml, tmp_path / "auto", "--steps", STEPS)
    train(yaml, tmp_path / "off", "--steps", STEPS, "features.compile=false", "features.fused_kernels=false")
    assert losses(tmp_path / "auto") == losses(tmp_path / "off")
    assert differing(tensors(tmp_path / "auto"), tensors(tmp_path / "off")) == []


def test_a_run_saved_without_them_goes_on_with_them(yaml: Path, tmp_path: Path) -> None:
    off = ("features.compile=false", "features.fused_kernels=false")
    train(yaml, tmp_path / "save", "--steps", STEPS, *off)
    out = train(yaml, tmp_path / "save", "--steps", 1)
    assert list(losses(tmp_path / "save"))[-1] == STEPS + 1
    assert "changed" not in out and "--accept" not in out


@pytest.mark.usefixtures("on_hopper")
def test_a_device_compiles_and_counts(yaml: Path, tmp_path: Path) -> None:
    before = layer_operators.graph_runs()
    out = train(yaml, tmp_path / "save", "--steps", STEPS, "--verbose")
    assert "compiled blocks: 2 by inductor (triton makes kernels for this device)" in out
    assert "2 rotary embeddings by torch.compile (they become parts of the compiled blocks)" in out
    events = [each for each in lines(tmp_path / "save" / "events.jsonl") if each["kind"] == "compile"]
    assert events[-1]["compiled_calls"] == events[-1]["calls"] == 2 * STEPS
    assert events[-1]["compilations"] <= 2
    # Outside of blocks stands the last norm.
    assert layer_operators.graph_runs() - before == {"norm": STEPS}


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["training.train_iters=20"], "the run has 20 steps"),
        (["training.use_deter_comp=true"], "training.use_deter_comp"),
        (["features.recompute=true", "features.recompute_plan.use_reentrant=true"], "use_reentrant"),
    ],
)
def test_check_says_why_blocks_are_left_alone(yaml: Path, words: list[str], reason: str) -> None:
    (line,) = (line for line in mm("check", yaml, *words).out.splitlines() if "compiled blocks:" in line)
    assert "off (" in line and reason in line


def test_check_says_what_installing_would_give(yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "here", classmethod(lambda _cls: Machine("cuda", frozenset(), (9, 0))))
    out = mm("check", yaml).out
    assert "pip install liger-kernel" in out and "pip install triton" in out


def test_launch_scripts_keep_the_defaults_of_megatron() -> None:
    words = ["--micro-batch-size", "1", "--train-iters", "100", "--lr", "1e-4"]
    features: Any = from_flags(words, {}).arguments.features
    assert (features.compile, features.fused_kernels) == (False, False)
    features = from_flags([*words, "--use-fused-rmsnorm"], {}).arguments.features
    assert (features.compile, features.fused_kernels) == (False, "auto")
