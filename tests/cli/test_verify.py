"""`mm verify`: its help, what it refuses before torch is imported, its table, its JSON and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.model_kinds import GENERATOR
from mindspeed_mm.tasks.requests.measure import VerifyRequest
from mindspeed_mm.tasks.verify import verify
from mindspeed_mm.tasks.verify.faults import FAULTS, PlannedRun, check_fault
from mindspeed_mm.tasks.verify.setup import smallest_plan
from mindspeed_mm.tasks.verify.table import Row, Verification, worst_rows
from tests.helpers.runs import Said, mm

ROWS = (
    Row("as planned = one process", "loss", deviation=3.3e-16, place="step 2", expected=1.5, found=1.5),
    Row("as planned = one process", "gradients", deviation=2e-13, place="step 1, lm_head.weight"),
    Row("resumed = uninterrupted", "weights", tolerance=0.0),
    Row("packed = unpacked", "", note="not used, the data set makes its own batches"),
)
OFF = Row(
    "as planned = one process", "clip norm", deviation=0.5, place="step 1, norm.weight", expected=1.25, found=2.5
)  # fmt: skip


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the task is to find."""
    given: dict[str, Any] = {"rows": ROWS}

    def run(request: VerifyRequest) -> Verification:
        given["asked"] = (request.overrides, request.nproc, request.full)
        rows, fault = given["rows"], request.fault
        return Verification(request.config, "2 processes: dp_shard 2", "Model", ("weights: random",), rows, 12.3, fault)

    monkeypatch.setattr(verify, "run", run)
    return given


def write(folder: Path, text: str = "") -> Path:
    (folder / "rows.jsonl").write_text("{}\n")
    path = folder / "run.yaml"
    path.write_text(f"model: {{model_name_or_path: {folder}}}\n{text}")
    return path


def lines(said: Said) -> list[str]:
    return said.out.splitlines()


def test_help_lists_every_fault() -> None:
    text = mm("verify", "--help").out
    for name, fault in FAULTS.items():
        assert name in text and fault.what in " ".join(text.split())


def test_equal(outcome: dict[str, Any]) -> None:
    said = mm("verify", "run.yaml", "training.lr=1", "--nproc", "3", "--full")
    assert said.code == 0 and outcome["asked"] == (("training.lr=1",), 3, True)
    assert said.out.startswith("run.yaml: equal\n")
    assert ["gradients", "2.0e-13", "1e-09", "step", "1,", "lm_head.weight"] in [line.split() for line in lines(said)]
    assert "packed = unpacked: not used, the data set makes its own batches\n" in said.out
    assert "weights: random" in said.out and "tolerance 1e-09" in said.out


def test_a_miss_names_check_parameter_and_both_values(outcome: dict[str, Any]) -> None:
    outcome["rows"] = (*ROWS, OFF)
    said = mm("verify", "run.yaml")
    assert said.code == 5 and said.out.startswith("run.yaml: 1 of 4 quantities deviate\n")
    assert "off: as planned = one process, clip norm, step 1, norm.weight: 2.5 instead of 1.25" in said.out


def test_a_fault_that_is_not_noticed_is_a_bug(outcome: dict[str, Any]) -> None:
    said = mm("verify", "run.yaml", "--inject", "wrong-divisor")
    assert said.code == 1 and "NOT NOTICED" in said.out
    outcome["rows"] = (OFF,)
    assert mm("verify", "run.yaml", "--inject", "wrong-divisor").code == 5


def test_json_is_strict(outcome: dict[str, Any]) -> None:
    outcome["rows"] = (*ROWS, Row("a", "b", deviation=float("inf"), found=float("nan")))
    said = mm("verify", "run.yaml", "--json")
    found = json.loads(said.out, parse_constant=lambda name: pytest.fail(name))
    assert said.code == 5 and found["missed"] == 1
    assert found["rows"][-1]["deviation"] == "inf" and found["rows"][-1]["missed"]
    assert found["rows"][0] | {"place": "step 2"} == found["rows"][0]


def test_nan_is_off_and_the_worst_rank_counts() -> None:
    assert Row("a", "b", deviation=float("nan")).is_missed
    ranks = [[Row("a", "b", deviation=value)] for value in (1e-12, float("nan"), 1e-3)]
    assert worst_rows(ranks)[0].is_missed
    assert worst_rows([[Row("a", "b", deviation=1e-12)], [Row("a", "b", deviation=1e-3)]])[0].deviation == 1e-3


def test_unknown_fault(tmp_path: Path) -> None:
    said = mm("verify", write(tmp_path), "--inject", "wrong-devisor")
    assert (
        said.code == 2 and "'wrong-devisor' is not a fault" in said.err and "Did you mean 'wrong-divisor'?" in said.err
    )


def test_fault_that_cannot_show_names_the_plan_that_it_needs(tmp_path: Path) -> None:
    said = mm("verify", write(tmp_path), "--inject", "lost-border-token")
    assert said.code == 2 and "cannot show under this plan" in said.err and "ring_attention_size=2" in said.err


def test_every_fault_shows_under_some_plan() -> None:
    from mindspeed_mm.core.errors import ConfigError
    from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments

    plans = [{}, {"fully_shard_parallel_size": 1}, {"tensor_parallel_size": 2}, {"ring_attention_size": 2},
             {"expert_parallel_size": 2}, {"pipeline_parallel_size": 2}]  # fmt: skip
    runs = [PlannedRun(smallest_plan(ParallelArguments(**plan), None)[1]) for plan in plans]
    for name, fault in FAULTS.items():
        assert any(fault.shows_in(run) for run in runs), name
    with pytest.raises(ConfigError, match="a language model"):
        check_fault("labels-off-by-one", PlannedRun(runs[0].sizes, GENERATOR))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["training.learning_rat=1"], 2, "unknown key"),
        (["inference.seed=7"], 2, "asks for a feature that this version does not have"),
        (["model.model_name_or_path=nowhere/at/all"], 4, "does not exist"),
        (["parallel.tensor_parallel_size=2", "--nproc", "3"], 2, "does not divide the 3 ranks"),
    ],
)
def test_what_train_would_refuse(tmp_path: Path, words: list[str], code: int, message: str) -> None:
    said = mm("verify", write(tmp_path), *words)
    assert said.code == code and message in said.err
