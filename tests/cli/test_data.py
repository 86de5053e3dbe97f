"""`mm data check | preview | stats` as a person and a machine call them: exit codes, JSON, files, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_mm.cli import main
from tests.tasks.data_rows import make_run


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("bad"), bad=True)


def test_check_ends_with_4_and_lists_bad_rows(bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--json", "--bad-rows", str(tmp_path / "bad.jsonl"), "--html", str(tmp_path / "check.html")]
    assert main.run(["data", "check", str(bad), *words]) == 4
    told = json.loads(capsys.readouterr().out)
    assert told["exit_code"] == 4
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == told["bad"] == 16
    assert (tmp_path / "check.html").read_text().startswith("<!doctype html>")


def test_check_ends_with_0_and_says_ok(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["data", "check", str(good), "--limit", "5"]) == 0
    assert f"{good}: ok\n  5 of 24 rows read, 5 usable" in capsys.readouterr().out


def test_preview_and_stats(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["data", "preview", str(good), "--rows", "1,2", "--html", str(tmp_path / "p.html")]) == 0
    text = capsys.readouterr().out
    assert "«" in text
    assert "\x1b" not in text
    assert main.run(["data", "preview", str(good), "--count", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [len(row["answers"][0]["input_ids"]) > 0 for row in told["shown"]] == [True, True]
    assert main.run(["data", "stats", str(good), "--json", "--html", str(tmp_path / "s.html")]) == 0
    assert json.loads(capsys.readouterr().out)["usable"] == 24
    assert {path.name for path in tmp_path.iterdir()} == {"p.html", "s.html"}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["preview", "{yaml}", "--rows", "a,b"], 2, "'a,b' is not a list of numbers"),
        (["preview", "{yaml}", "--rows", "24"], 2, "row 24 does not exist"),
        (["stats", "{yaml}", "data.nonsense=1"], 2, "nonsense"),
        (["stats", "none.yaml"], 2, "none.yaml"),
        (["stats", "{yaml}", "data.dataset_param.basic_parameters.dataset=none.jsonl"], 4, "does not exist"),
        (["chek", "{yaml}"], 2, "chek"),
    ],
)
def test_what_is_refused(
    words: list[str], code: int, message: str, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["data", *(word.format(yaml=good) for word in words)]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["check", "preview", "stats"])
def test_help_has_two_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["data", verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.partition("Examples:")[2].count(f"mm data {verb}") >= 2
    assert "--json" in text
