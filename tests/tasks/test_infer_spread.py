"""`mm infer --plan`: a model that is spread over ranks says what it says in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from mindspeed_mm.core.errors import MMError, UsageError
from mindspeed_mm.fsdp.distributed import parallel_state
from mindspeed_mm.tasks.answer import infer
from mindspeed_mm.tasks.requests.infer import InferRequest
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_tiny_qwen3_moe, make_tiny_qwen3_vl

TOKENS = 5
FSDP = "{param_dtype: fp32, reduce_dtype: fp32}"
PLANS = {
    "fsdp": f"fully_shard_parallel_size: auto, fsdp_plan: {FSDP}",
    "tp": f"tensor_parallel_size: 2, fsdp_plan: {FSDP}",
    "ulysses": f"ulysses_parallel_size: 2, fsdp_plan: {FSDP}",  # of training: an answer has weights to share alone
    "ep": f"expert_parallel_size: 2, fsdp_plan: {FSDP}",
}

OF_TRAINING = """\
training:
  lora: {enable: true, target_modules: [q_proj]}
  lr_scaling_plan: [{match: lora_B, scale: 4}]
  no_decay_params: ['*.lora_A*']
  optimizer_state_dtype: int8
"""
"""What says something of parameters that a model without adapters does not have."""


def make_plan(folder: Path, model: Path, words: str) -> Path:
    path = folder / "plan.yaml"
    path.write_text(f"model: {{model_name_or_path: {model}}}\nparallel: {{{words}}}\n{OF_TRAINING}")
    return path


def make_rows(folder: Path, *, shows: bool) -> Path:
    """Rows of several lengths, every second one with a picture."""
    lines = []
    for number in range(5):
        row: dict[str, object] = {"prompt": "what is this? " * (number + 1)}
        if shows and number % 2:
            pixels = torch.randint(0, 255, (32, 16 * number, 3), dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
            row["image"] = f"{number}.png"
        lines.append(json.dumps(row) + "\n")
    path = folder / "rows.jsonl"
    path.write_text("".join(lines))
    return path


def answer_as_rank(model: str, rows: str, out: str, plan: str, beams: int | None = None) -> str:
    sampling = {"temperature": None if beams else 1.5, "beams": beams}
    try:
        infer.run(
            InferRequest(
                Path(model),
                data=Path(rows),
                out=Path(out),
                max_new_tokens=TOKENS,
                batch_size=2,
                plan=Path(plan),
                **sampling,
            )
        )
    except MMError as error:
        return str(error)
    # Groups that are kept alive until the interpreter ends abort it now and then.
    assert not parallel_state._meshes and parallel_state._state is None
    return ""


def check_same(model: Path, folder: Path, words: str, *, shows: bool) -> None:
    rows, plan = make_rows(folder, shows=shows), make_plan(folder, model, words)
    said = run_ranks(2, answer_as_rank, str(model), str(rows), str(folder / "two.jsonl"), str(plan))
    assert said == ["", ""]
    infer.run(
        InferRequest(model, data=rows, out=folder / "one.jsonl", max_new_tokens=TOKENS, batch_size=2, temperature=1.5)
    )
    assert (folder / "two.jsonl").read_text() == (folder / "one.jsonl").read_text()
    answers = [json.loads(line)["answer"] for line in (folder / "one.jsonl").read_text().splitlines()]
    assert len(set(answers)) > 2


def test_a_sharded_model_says_what_it_says_in_one_process(tmp_path: Path) -> None:
    model = make_tiny_qwen3_vl(tmp_path / "model", tie=False, initializer_range=0.4)
    check_same(model, tmp_path, PLANS["fsdp"], shows=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (make_tiny_qwen3_vl, "tp"),
        (make_tiny_qwen3_vl, "ulysses"),
        (make_tiny_qwen3_moe, "fsdp"),
        (make_tiny_qwen3_moe, "tp"),
        (make_tiny_qwen3_moe, "ep"),
    ],
)
def test_every_plan(tmp_path: Path, make: Callable[..., Path], name: str) -> None:
    model = make(tmp_path / "model", initializer_range=0.4)
    check_same(model, tmp_path, PLANS[name], shows=make is make_tiny_qwen3_vl)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "beams", "message"),
    [
        (PLANS["fsdp"], 2, "beams are not searched"),
        ("pipeline_parallel_size: 2, pp_plan: {schedule: gpipe}", None, "layers that are spread"),
        ("tensor_parallel_size: 3", None, "3"),
    ],
)
def test_all_ranks_refuse_together(tmp_path: Path, words: str, beams: int | None, message: str) -> None:
    model = make_tiny_qwen3_vl(tmp_path / "model")
    rows, plan = make_rows(tmp_path, shows=False), make_plan(tmp_path, model, words)
    said = run_ranks(2, answer_as_rank, str(model), str(rows), str(tmp_path / "out.jsonl"), str(plan), beams)
    assert all(message in each for each in said), said


@pytest.mark.slow
def test_the_command_ends_with_one_line(tmp_path: Path) -> None:
    model = make_tiny_qwen3_vl(tmp_path / "model", initializer_range=0.4)
    rows, plan = make_rows(tmp_path, shows=True), make_plan(tmp_path, model, PLANS["fsdp"])
    words = ["infer", model, "--data", rows, "--out", tmp_path / "out.jsonl", "--max-new-tokens", 2, "--plan", plan]
    command = [sys.executable, "-m", "mindspeed_mm.cli.main", *map(str, words), "--nproc", "2"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert said.returncode == 0 and "5 answered" in said.stdout, said.stderr
    (tmp_path / "3.png").write_bytes((tmp_path / "3.png").read_bytes()[:60])
    said = subprocess.run([*command, "--overwrite"], capture_output=True, text=True, timeout=600)
    assert said.returncode == 4 and "Traceback" not in said.stderr, said.stderr
    assert sum("3.png" in line for line in said.stderr.splitlines()) == 1, said.stderr


def test_what_is_not_spread(tmp_path: Path) -> None:
    model = make_tiny_qwen3_vl(tmp_path / "model")
    rows = make_rows(tmp_path, shows=False)
    plan = make_plan(tmp_path, model, "ulysses_parallel_size: 2")
    with pytest.raises(UsageError, match="one process holds the whole model"):
        infer.run(InferRequest(model, data=rows, out=tmp_path / "out.jsonl", plan=plan))
