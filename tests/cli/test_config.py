"""`mm config`."""

import json
from pathlib import Path

import pytest

from mindspeed_mm.cli.main import run
from mindspeed_mm.fsdp.params.loader import load_config

TEXT = "training:\n  lr: 1e-5\n  save_steps: 3\nmodel: {model_name_or_path: m}\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return path


def test_shows_every_value_with_its_origin(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", str(config), "training.seed=3"]) == 0
    printed = capsys.readouterr()
    lines = [line.strip() for line in printed.out.splitlines()]
    assert [line.split() for line in lines if line.startswith("lr:")] == [["lr:", "1.0e-05", "#", f"{config}:2:7"]]
    assert [line.split("  #")[1] for line in lines if line.startswith("seed: 3")] == [" command line"]
    assert any(line.startswith("clip_grad: 1.0") and line.endswith("# default") for line in lines)
    assert "save_steps" in printed.err
    assert "save_steps" not in printed.out


def test_what_is_printed_is_a_configuration(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["config", str(config)])
    copy = tmp_path / "copy.yaml"
    copy.write_text(capsys.readouterr().out)
    assert load_config(copy).arguments == load_config(config).arguments


def test_given_leaves_out_the_defaults(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", str(config), "--given"]) == 0
    text = capsys.readouterr().out
    assert [line.split(":")[0].strip() for line in text.splitlines()] == [
        "model", "model_name_or_path",
        "data", "dataset_param", "preprocess_parameters", "model_name_or_path",
        "training", "lr",
    ]  # fmt: skip
    copy = tmp_path / "copy.yaml"
    copy.write_text(text)
    assert load_config(copy).arguments == load_config(config).arguments


def test_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", str(config), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["config"]["training"]["lr"] == 1e-5
    assert record["origins"]["training.lr"] == f"{config}:2:7"
    assert len(record["warnings"]) == 1
    assert record["unchecked"] == []
