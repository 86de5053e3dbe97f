"""`mm evaluate --nproc` and `--plan`: ranks that share the questions, or the model, score what one process scores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.tasks.evaluate import evaluate
from mindspeed_mm.tasks.evaluate.published import evaluate as published
from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import lines
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_rows
from tests.tasks.test_evaluate_published import picture
from tests.tasks.test_infer_spread import PLANS, make_plan

TOKENS = 5
LIMITS: dict[str, Any] = {"max_new_tokens": TOKENS, "batch_size": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_vl(tmp_path_factory.mktemp("model"), tie=False, initializer_range=0.4)


def make_set(folder: Path) -> Path:
    rows = [{"questionId": n, "question": "is it? " * n, "image": "a.png", "answers": ["a"]} for n in range(1, 6)]
    (folder / "a.png").write_bytes(picture(2))
    (folder / "val_v1.0_withQT.json").write_text(json.dumps({"data": rows}))
    return folder


def score_as_rank(model: str, data: str, out: str, plan: str | None, benchmark: str | None) -> str:
    """What went wrong, or the score."""
    spread, answered = Path(plan) if plan else None, Path(out)
    try:
        if benchmark is None:
            asked = EvaluateRequest(model, data=Path(data), out=answered, plan=spread, metric="cer", **LIMITS)
            return json.dumps(evaluate.run(asked).overall.to_dict())
        request = EvaluateRequest(
            model,
            benchmark=benchmark,
            data=Path(data),
            out=answered,
            plan=spread,
            **LIMITS,  # type: ignore[arg-type]
        )
        return json.dumps(published.run(request).overall.to_dict())
    except MMError as error:
        return str(error)


def check_same(model: Path, data: Path, folder: Path, plan: Path | None, benchmark: str | None = None) -> None:
    words = (str(plan) if plan else None, benchmark)
    two = run_ranks(2, score_as_rank, str(model), str(data), str(folder / "two"), *words)
    one = score_as_rank(str(model), str(data), str(folder / "one"), None, benchmark)
    assert two == [one, one]
    assert lines(folder / "two" / "samples.jsonl") == lines(folder / "one" / "samples.jsonl")
    assert len({sample["given"] for sample in lines(folder / "one" / "samples.jsonl")}) > 2


@pytest.mark.slow
def test_a_spread_model_is_scored_as_in_one_process(model: Path, tmp_path: Path) -> None:
    rows = make_rows(tmp_path, count=5)
    check_same(model, rows, tmp_path, make_plan(tmp_path, model, PLANS["fsdp"]))


@pytest.mark.slow
@pytest.mark.parametrize("plan", [None, "tp"])
@pytest.mark.parametrize("benchmark", [None, "docvqa_val"])
def test_ranks_share(model: Path, tmp_path: Path, plan: str | None, benchmark: str | None) -> None:
    data = make_set(tmp_path) if benchmark else make_rows(tmp_path, count=5)
    check_same(model, data, tmp_path, make_plan(tmp_path, model, PLANS[plan]) if plan else None, benchmark)


@pytest.mark.slow
def test_one_process_prints(model: Path, tmp_path: Path) -> None:
    rows, out = make_rows(tmp_path, count=5), tmp_path / "out"
    words = ["evaluate", model, "--data", rows, "--out", out, "--max-new-tokens", 2]
    command = [sys.executable, "-m", "mindspeed_mm.cli.main", *map(str, words), "--nproc", "2"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert said.returncode == 0 and said.stdout.count("accuracy, all") == 1, said.stderr
    rows.write_text("{}\n")
    said = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert said.returncode == 4 and "Traceback" not in said.stderr, said.stderr
    assert said.stderr.count("1 of 1 rows are bad") == 1, said.stderr
