"""The quick start: what it refuses, what it writes, and, slow, the whole of it as a user runs it, twice."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_mm.cli.main import run
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.quickstart import make_digits, quickstart
from mindspeed_mm.quickstart.folder import MARK
from mindspeed_mm.quickstart.scans import load_ink
from tests.helpers.runs import mm

ROOT = Path(__file__).parents[2]
ACCURACY = re.compile(r"accuracy, [a-z-]+: \d+\.\d % \(n=\d+, 95 % interval \d+\.\d–\d+\.\d %\)")


def test_the_scans_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    ink, digits = load_ink()
    theirs = load_digits()
    assert np.array_equal(ink, theirs.images) and np.array_equal(digits, theirs.target)
    data = Path(make_digits.__file__).parent / "data"
    assert (data / "optdigits.tes.gz").stat().st_size < 150_000
    source = (data / "SOURCE.md").read_text()
    assert all(word in source for word in ("CC BY 4.0", "10.24432/C50P49", "Alpaydin", "Kaynak"))
    assert "CC BY 4.0" in (ROOT / "NOTICE").read_text()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_other_content_is_left_alone(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine"
    if kind == "folder":
        target.mkdir()
        (target / "thesis.tex").write_text("years of work")
    else:
        target.write_text("years of work")
    before = sorted(tmp_path.rglob("*"))
    assert run(["quickstart", str(target)]) == 2
    out, said = capsys.readouterr()
    assert out == "" and str(target) in said and "Name a folder that does not exist yet or is empty." in said
    assert sorted(tmp_path.rglob("*")) == before


def few(monkeypatch: pytest.MonkeyPatch) -> None:
    scans = make_digits.load_scans()[:100]
    monkeypatch.setattr(make_digits, "load_scans", lambda: scans)
    monkeypatch.setattr(make_digits, "READING_ROWS", {"train": 40, "validation": 4, "test": 4})


def test_data_of_this_recipe_are_reused_and_others_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch)
    folder = tmp_path / "with space: #1"
    folder.mkdir()  # an empty one will do
    first = quickstart.Quickstart(folder)
    assert first.make_data() is False
    assert first.make_data() is True
    (folder / MARK).write_text("unfinished\n")  # as a killed run leaves it
    assert first.make_data() is False
    config = load_config(first.config)
    assert (config.warnings, config.unchecked) == ((), ())
    arguments = config.arguments
    basic = arguments.data.dataset_param.basic_parameters
    for name in (basic.dataset, basic.val_dataset, basic.dataset_dir, arguments.model.model_name_or_path):
        assert Path(str(name)).is_relative_to(folder) and Path(str(name)).exists()
    assert Path(str(arguments.training.save)) == folder / "run"
    (folder / MARK).unlink()
    with pytest.raises(UsageError, match="left alone"):
        first.make_data()


def test_the_next_steps_parse_and_name_an_environment_that_is_not_active(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a b"
    learned = quickstart.Learned(
        folder, folder / "c.yaml", folder, folder / "hf", folder, folder / "1.png", True, {}, 0, {}
    )
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    assert quickstart.next_steps(learned)[0] == "source .venv/bin/activate"
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / ".venv"))
    verbs = [shlex.split(line)[:3] for line in quickstart.next_steps(learned)]
    assert verbs == [
        ["mm", "chat", str(folder / "hf")],
        ["mm", "train", str(folder / "c.yaml")],
        ["mm", "init", "--model"],
    ]


def test_too_few_right_answers_end_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def learned(accuracy: float) -> Any:
        place = Path("runs/digits")
        scores = {"naming": {"accuracy": accuracy}}
        return quickstart.Learned(place, place, place, place, place, place, True, scores, 24, {})

    for accuracy, code in ((0.95, 0), (0.949, 5)):
        monkeypatch.setattr(quickstart.Quickstart, "run", lambda _, found=accuracy: learned(found))
        assert run(["quickstart", "--json"]) == code
        said = capsys.readouterr()
        assert json.loads(said.out)["accuracy"]["naming"]["accuracy"] == accuracy
        assert ("fewer than 95%" in said.err) == (code == 5)


@pytest.mark.slow
def test_quickstart(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "mindspeed_mm", "quickstart", "new"]
    first = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=tmp_path)
    assert first.returncode == 0, first.stderr[-3000:]
    accuracies = ACCURACY.findall(first.stdout)
    assert accuracies == accuracies_of_the_readme()
    assert "the same tokens on 24 of 24 rows" in first.stdout
    assert (tmp_path / "new" / "run" / "report.html").stat().st_size < 2_000_000

    again = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "reused:" in again.stderr and ACCURACY.findall(again.stderr) == accuracies
    summary = json.loads(again.stdout)
    assert summary["reused"] and summary["accuracy"]["naming"]["n"] == 359
    said = mm("infer", tmp_path / "new" / "hf", "--prompt", "hello")
    assert said.code == 0, said.err


def accuracies_of_the_readme() -> list[str]:
    found = ACCURACY.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(found) == 4
    return found
