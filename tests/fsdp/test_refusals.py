"""What training refuses before its first step, `mm check` refuses: one table of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fsdp.refusals import TABLE, Refusal, make_base, spoiled
from tests.helpers.runs import mm

pytestmark = pytest.mark.edge("R4")

BY_DATA_CHECK = [row for row in TABLE if row.by_data_check]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base")).parent


def words_of(row: Refusal, folder: Path) -> list[str]:
    return [word.replace("{folder}", str(folder)) for word in row.words]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_training_and_check_refuse_alike(row: Refusal, base: Path, tmp_path: Path) -> None:
    yaml = spoiled(base, tmp_path / "run", row)
    words = words_of(row, yaml.parent)
    trained = mm("train", yaml, *words, "training.train_iters=1")
    assert (trained.code, row.said in trained.err, row.key in trained.err) == (row.code, True, True), trained.err
    checked = mm("check", yaml, *words, "--json")
    findings = json.loads(checked.out)["findings"]
    alike = [each for each in findings if each["what"] in trained.err and each["key"] in ("", row.key)]
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
