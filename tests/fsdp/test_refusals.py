"""What training refuses before its first step, `mm check` refuses: one table of both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.fsdp.distributed.pipeline import plan as pipeline_plan
from mindspeed_mm.fsdp.models.behaviour import quantized_linear
from tests.fsdp.refusals import LONG_TABLE, SHORT_TABLE
from tests.fsdp.refusals_of_resumes import SAVE, with_a_run
from tests.helpers.pretended_ranks import first_of
from tests.helpers.refusal import ENVIRONMENT, LORA, USAGE, Refusal, make_base, spoiled
from tests.helpers.runs import mm

pytestmark = pytest.mark.edge("R4")

BY_DATA_CHECK = [row for row in SHORT_TABLE if row.by_data_check]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run by its name, see `make_base`."""
    return cache(lambda name: make_base(tmp_path_factory.mktemp(name), name).parent)


def words_of(row: Refusal, folder: Path) -> list[str]:
    return [word.replace("{folder}", str(folder)) for word in row.words]


def _param(row: Refusal) -> Any:
    marks = [pytest.mark.slow] if row in LONG_TABLE else []
    return pytest.param(row, marks=marks, id=f"{row.base}: {row.name}")


@pytest.mark.parametrize("row", map(_param, (*SHORT_TABLE, *LONG_TABLE)))
def test_training_and_check_refuse_alike(row: Refusal, base: Callable[[str], Path], tmp_path: Path) -> None:
    """Both refuse, with the exit code, the key and the words of the row; a wrong configuration under the file's name,
    with the place that the value comes from."""
    yaml = spoiled(base(row.base), tmp_path / "run", row)
    words = words_of(row, yaml.parent)
    with first_of(row.ranks):
        trained = mm("train", yaml, "training.train_iters=2", *words)
    assert (trained.code, row.said in trained.err, row.key in trained.err) == (row.code, True, True), trained.err
    checked = mm("check", yaml, *words, "--json", *(["--nproc", row.ranks] if row.ranks > 1 else []))
    findings = json.loads(checked.out)["findings"]
    alike = [
        each
        for each in findings
        if row.key in each["key"] and (each["what"] in trained.err or row.said in each["what"])
    ]
    assert checked.code == row.code and alike, f"{findings}\n{trained.err}"
    if row.code == USAGE:
        assert re.search(rf"^{re.escape(str(yaml))}: (1 problem|\d+ problems)$", trained.err, re.MULTILINE), trained.err
        assert all(each["where"] in trained.err for each in alike if each["what"] in trained.err), trained.err


@pytest.mark.parametrize("changes", [["training.seed=8"], ["training.seed=8", "training.optimizer=muon"]])
def test_a_refused_resume_says_how_to_go_on(changes: list[str], base: Callable[[str], Path], tmp_path: Path) -> None:
    yaml = spoiled(base("vision"), tmp_path / "run", Refusal("a run", (), "", spoil=with_a_run()))
    words = [SAVE.replace("{folder}", str(yaml.parent)), *changes]
    trained, checked = mm("train", yaml, *words, "training.train_iters=2"), mm("check", yaml, *words)
    for said in (trained.err, checked.out + checked.err):
        assert "this is not the run that saved the checkpoint. Undo these changes; or start a new run from its" in said
        assert re.search(r"training.seed +was 7, is 8", said)


def test_a_schedule_that_torch_has_wrong_is_refused_alike(
    base: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pipeline_plan._NEEDS_TORCH, "zbv", "99.1")
    words = tuple(f"parallel.{key}" for key in ("pipeline_parallel_size=2", "pp_plan.schedule=zbv"))
    row = Refusal("zbv", words, "'zbv' needs torch 99.1", "parallel.pp_plan.schedule", ENVIRONMENT, ranks=2)
    test_training_and_check_refuse_alike(row, base, tmp_path)


def test_bytes_that_torch_cannot_shard_are_refused_alike(
    base: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_linear, "_NEEDS_TORCH", "99.1")
    words = (*LORA, "training.lora.quantize=nf4")
    row = Refusal("nf4", words, "quantised layers needs torch 99.1", "training.lora.quantize", ENVIRONMENT, ranks=2)
    test_training_and_check_refuse_alike(row, base, tmp_path)


@pytest.mark.parametrize("row", map(_param, BY_DATA_CHECK))
def test_what_concerns_rows_is_found_by_data_check(row: Refusal, base: Callable[[str], Path], tmp_path: Path) -> None:
    yaml = spoiled(base(row.base), tmp_path / "run", row)
    said = mm("data", "check", yaml, *words_of(row, yaml.parent), "--json")
    assert said.code in (row.code, 4), said.err
    assert row.said in said.out + said.err


def test_the_run_that_the_table_spoils_trains(base: Callable[[str], Path]) -> None:
    yaml = base("vision") / "run.yaml"
    assert mm("check", yaml).code == 0
    assert mm("data", "check", yaml).code == 0
    assert mm("train", yaml, "training.train_iters=1").code == 0
