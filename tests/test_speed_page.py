"""docs/speed.md: its commands run as they stand, and each number that it names is one that a run writes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mindspeed_mm.cli.main import run
from mindspeed_mm.fsdp.train.run.progress import HEADER
from tests.helpers.runs import lines
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_tiny_run

PAGE = (Path(__file__).parents[1] / "docs" / "speed.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speed")
    make_tiny_qwen3_vl(folder / "models" / "tiny")
    make_tiny_run(folder, training={"save": str(folder / "out"), "train_iters": 2, "micro_batch_size": 2})
    return folder


def test_the_commands_run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    lines_of_page = "".join(re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)).splitlines()
    assert len(lines_of_page) == 5
    for line in lines_of_page:
        assert run(shlex.split(line, comments=True)[1:]) == 0, line
    assert "MFU" in capsys.readouterr().out


def test_every_number_that_the_page_names_is_written(folder: Path) -> None:
    assert HEADER in PAGE
    table = PAGE.partition("| column |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", table)) - {"memory_reserved_gib"}  # an accelerator's
    assert named <= lines(folder / "out" / "metrics.jsonl")[-1].keys()
    assert {"mfu", "hfu_full", "data_share", "useful"} <= named
