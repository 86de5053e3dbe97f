"""fp16 trains with a loss scale, as a plain loop with `torch.amp.GradScaler` does: the same steps are left out, the
scale falls and grows alike, a run that goes on equals one that did not stop."""

from __future__ import annotations

import copy
import json
import math
from itertools import compress, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mindspeed_mm.fsdp.loss.objectives import TokenCrossEntropy
from mindspeed_mm.fsdp.optimizer.loss_scale import LossScale
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import differing, lines, mm, tensors, train, watched_steps
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_run import make_rows, make_tiny_run

pytestmark = pytest.mark.edge("N10")

FIRST = 2.0**22
"""Of two runs: some steps overflow at first."""
EPSILON = 0.01
"""Of Adam: about as large as gradients are, so that an update depends on how large they are."""
FP16 = ("parallel.fsdp_plan.param_dtype=fp16", f"training.initial_loss_scale={FIRST}", "training.loss_scale_window=2")


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp16")
    make_tiny_qwen3(folder / "model", initializer_range=0.3)
    make_rows(folder, images=(0,))
    training = {
        "train_iters": 12,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "clip_grad": 0.5,
        "lr": 1e-3,
    }
    return make_tiny_run(folder, training=training | {"save_interval": 100})


def scales(save: Path) -> list[float]:
    return [line["loss_scale"] for line in lines(save / "metrics.jsonl") if "loss_scale" in line]


def test_the_scale_goes_as_in_torch() -> None:
    """Over steps that overflow and steps that do not; the window and the factors are torch's own arguments."""
    ours = LossScale(2.0**16, window=3, least=2.0**-40)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1e-9)
    random = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(60):
        overflows = bool(torch.rand((), generator=random) < 0.3)
        parameter.grad = torch.tensor([1.0, float("inf") if overflows else 1.0])
        theirs.scale(torch.ones(()))
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflowed=overflows)
        assert (ours.value, ours.good_steps) == (theirs.get_scale(), theirs._get_growth_tracker())
        seen.add(ours.value)
    assert len(seen) > 4


def plain_loop(
    model_folder: Path, steps: list[list[dict[str, Any]]], clip_grad: float
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """torch's GradScaler, AdamW and clip_grad_norm_ (0: none) over fp32 weights, whose copies in fp16 compute; the
    scale and the gradient norm of each step, and the weights at the end."""
    from transformers import AutoModelForCausalLM

    masters = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    half = copy.deepcopy(masters)
    for parameter in half.parameters():
        parameter.data = parameter.data.half()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-3, weight_decay=0.0, eps=EPSILON)
    scaler = torch.amp.GradScaler("cpu", init_scale=FIRST, growth_interval=2)
    found, norms = [], []
    for batches in steps:
        found.append(scaler.get_scale())
        for master, own in zip(masters.parameters(), half.parameters(), strict=True):
            own.data.copy_(master.data)
            master.grad = torch.zeros_like(master)
        count = sum(int((batch["shift_labels"] != -100).sum()) for batch in batches)
        for batch in batches:
            logits = half(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum") / count
            scaler.scale(loss).backward()
            for master, own in zip(masters.parameters(), half.parameters(), strict=True):
                master.grad += own.grad.float()
                own.grad = None
        scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(masters.parameters(), clip_grad or float("inf"))))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return found, norms, {name: parameter.detach() for name, parameter in masters.named_parameters()}


@pytest.mark.parametrize("clip_grad", [0.5, 0.0])
def test_a_run_is_that_of_a_plain_loop(yaml: Path, tmp_path: Path, clip_grad: float) -> None:
    steps: list[list[dict[str, Any]]] = []
    words = (f"training.clip_grad={clip_grad}", f"training.adam_eps={EPSILON}")
    with watched_steps(lambda _, batches: steps.append(copy.deepcopy(list(batches)))):
        said = train(yaml, tmp_path, *FP16, *words)
    found, norms, weights = plain_loop(yaml.parent / "model", steps, clip_grad)
    assert scales(tmp_path) == found
    own_norms = [line["grad_norm"] for line in lines(tmp_path / "metrics.jsonl")]
    finite = [math.isfinite(norm) for norm in norms]
    assert [norm is not None and math.isfinite(norm) for norm in own_norms] == finite
    assert said.count("gradients overflowed in fp16") == finite.count(False)
    for own, expected in zip(compress(own_norms, finite), compress(norms, finite), strict=True):
        assert own == pytest.approx(expected, rel=1e-2)
    falls, grows = ([b / a for a, b in pairwise(found)].count(factor) for factor in (0.5, 2.0))
    assert falls >= 1 and grows >= 1, found
    trained = {name.removeprefix("model."): tensor for name, tensor in tensors(tmp_path).items()}
    for name, expected in weights.items():
        own = next(tensor for key, tensor in trained.items() if key == name or f"model.{key}" == name)
        # An update is at most 1e-3 a step. Sums in fp16 come in another order: rarely a gradient near 0 turns its sign.
        assert (own - expected).abs().mean() < 1e-4, name


def test_a_run_that_goes_on_equals_the_whole_to_the_bit(yaml: Path, tmp_path: Path) -> None:
    train(yaml, tmp_path / "whole", *FP16)
    for steps in (3, 2, 9):
        train(yaml, tmp_path / "parts", *FP16, "--steps", steps)
    assert differing(tensors(tmp_path / "whole"), tensors(tmp_path / "parts")) == []
    assert scales(tmp_path / "parts") == scales(tmp_path / "whole")


def overflow_on(rank: int, step: int) -> Any:
    """Gradients of the first micro-batch of a step are too large on one rank; its loss is what it is."""
    real, calls = TokenCrossEntropy.terms, []

    def terms(self: Any, model: nn.Module, batch: Any) -> Any:
        found = real(self, model, batch)
        calls.append(None)
        if dist.get_rank() == rank and len(calls) == step:
            found["loss"] = found["loss"] + (found["loss"] - found["loss"].detach()) * 1e30
        return found

    return mock.patch.object(TokenCrossEntropy, "terms", terms)


def two_ranks(yaml: str, save: str, accumulation: int, *words: str) -> None:
    with overflow_on(1, 2 * accumulation + 1):
        split = f"training.gradient_accumulation_steps={accumulation}"
        train(yaml, f"{save}/run", *FP16, split, "training.initial_loss_scale=1024.", "--steps", 5, *words)


@pytest.mark.parametrize(
    ("accumulation", "words"),
    [
        pytest.param(1, (), id="sharded"),
        pytest.param(1, ("features.enable_gradient_offload=true",), id="gradients on the host"),
        pytest.param(2, ("parallel.pipeline_parallel_size=2",), id="stages"),
    ],
)
def test_what_overflows_on_one_rank_is_left_out_on_all(
    yaml: Path, tmp_path: Path, accumulation: int, words: tuple[str, ...]
) -> None:
    """In the third step, of the rank that has the last stage where there are stages."""
    run_ranks(2, two_ranks, str(yaml), str(tmp_path), accumulation, *words)
    assert scales(tmp_path / "run") == [1024, 1024, 2048, 1024, 1024]
    alone = tmp_path / "alone"
    with overflow_on(0, 3):
        batches = ("training.micro_batch_size=4", "training.gradient_accumulation_steps=1")
        train(yaml, alone, *FP16, *batches, "training.initial_loss_scale=1024.", "--steps", 5)
    norms = [[line["grad_norm"] for line in lines(save / "metrics.jsonl")] for save in (tmp_path / "run", alone)]
    assert norms[0][:2] + norms[0][3:] == pytest.approx(norms[1][:2] + norms[1][3:], rel=2e-2)


def test_overflow_at_the_smallest_scale_is_a_step_that_is_not_finite(yaml: Path, tmp_path: Path) -> None:
    with overflow_on(0, 1):
        said = mm("train", yaml, f"training.save={tmp_path}", *FP16, "training.min_loss_scale=4194304.")
    assert said.code == 5
    assert "compute in bf16" in said.err


def test_the_checkpoint_holds_the_scale(yaml: Path, tmp_path: Path) -> None:
    train(yaml, tmp_path, *FP16, "training.initial_loss_scale=8.", "--steps", 3)
    state = json.loads(next(tmp_path.glob("iter_*/trainer_state.json")).read_text())
    assert state["loss_scale"] == {"value": 16.0, "good_steps": 1}
    assert any(b"loss_scale" in path.read_bytes() for path in tmp_path.rglob("events.out.*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("training.min_loss_scale=8.", "training.initial_loss_scale=4."), "is above training.initial_loss_scale"),
        (("training.quantization_plan={recipe_name: tensorwise}",), "are computed from bf16"),
    ],
)
def test_what_cannot_work_is_refused(yaml: Path, words: tuple[str, ...], message: str) -> None:
    said = mm("check", yaml, "--config-only", "parallel.fsdp_plan.param_dtype=fp16", *words)
    assert said.code == 2 and message in said.out + said.err
