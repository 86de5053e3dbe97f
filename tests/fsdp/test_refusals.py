"""What training refuses before its first step, `mm check` refuses: one table of both."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fsdp.refusals import OF_PLANS, TABLE, Refusal, make_base, spoiled
from tests.helpers.runs import Said, mm

pytestmark = pytest.mark.edge("R4")

BY_DATA_CHECK = [row for row in TABLE if row.by_data_check]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base")).parent


def words_of(row: Refusal, folder: Path) -> list[str]:
    return [word.replace("{folder}", str(folder)) for word in row.words]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_training_and_check_refuse_alike(row: Refusal, base: Path, tmp_path: Path) -> None:
    refuse_alike(row, spoiled(base, tmp_path / "run", row), mm)


def _of_plans(row: Refusal) -> Any:
    marks = [pytest.mark.xfail(strict=True, reason=row.waits)] if row.waits else []
    return pytest.param(row, marks=marks, id=row.name)


@pytest.mark.slow
@pytest.mark.parametrize("row", map(_of_plans, OF_PLANS))
def test_training_and_check_refuse_plans_alike(row: Refusal, base: Path, tmp_path: Path) -> None:
    refuse_alike(row, spoiled(base, tmp_path / "run", row), mm_in_a_process)


def mm_in_a_process(*words: object) -> Said:
    """A launcher that ends with its ranks would take this process along."""
    command = [sys.executable, "-m", "mindspeed_mm", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return Said(done.returncode, done.stdout, done.stderr)


def refuse_alike(row: Refusal, yaml: Path, run: Callable[..., Said]) -> None:
    """Both refuse, with the exit code, the key and the words of the row."""
    words = [*words_of(row, yaml.parent), *(["--nproc", row.ranks] if row.ranks > 1 else [])]
    trained = run("train", yaml, *words, "training.train_iters=1")
    assert (trained.code, row.said in trained.err, row.key in trained.err) == (row.code, True, True), trained.err
    checked = run("check", yaml, *words, "--json")
    findings = json.loads(checked.out)["findings"]
    alike = [
        each
        for each in findings
        if row.key in ("", each["key"]) and (each["what"] in trained.err or row.said in each["what"])
    ]
    assert checked.code == row.code and alike, f"{findings}\n{trained.err}"


@pytest.mark.parametrize("row", BY_DATA_CHECK, ids=lambda row: row.name)
def test_what_concerns_rows_is_found_by_data_check(row: Refusal, base: Path, tmp_path: Path) -> None:
    yaml = spoiled(base, tmp_path / "run", row)
    said = mm("data", "check", yaml, *words_of(row, yaml.parent), "--json")
    assert said.code in (row.code, 4), said.err
    assert row.said in said.out + said.err


def test_the_run_that_the_table_spoils_trains(base: Path) -> None:
    assert mm("check", base / "run.yaml").code == 0
    assert mm("data", "check", base / "run.yaml").code == 0
    assert mm("train", base / "run.yaml", "training.train_iters=1").code == 0
