"""`ConfigManager` of MindSpeed-MM's FSDP2 scripts reads what `mm train` reads, and a trainer takes what it returns."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mindspeed_mm.config.config_manager import ConfigManager
from mindspeed_mm.core.errors import ConfigError, UsageError
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.train.trainer import Trainer

YAML = """\
model: {model_id: toy_lm, train_from_scratch: true}
data: {dataset_param: {dataset_type: toy_rows, toy_count: 16}, dataloader_param: {num_workers: 0}}
training: {plugin: [toy_plugin], lr: 0.05, micro_batch_size: 8, train_iters: 3}
"""


@pytest.fixture
def yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "plugins"))
    path = tmp_path / "toy.yaml"
    path.write_text(YAML)
    return path


def test_a_script_reads_its_command_line_and_trains(
    yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", str(yaml), "training.lr=0.1", "model.toy_width=4"])
    manager = ConfigManager(config_class=Arguments, additional_args={"training": {"save": str(tmp_path / "run")}})
    assert manager.get_config() is None
    arguments = manager.load_and_parse()
    assert manager.get_config() is arguments
    assert (arguments.training.lr, arguments.model.get("toy_width"), arguments.training.train_iters) == (0.1, 4, 3)
    Trainer(arguments).train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("loss" in line for line in lines) == 3


def test_a_file_may_be_named_and_words_left_alone(yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", "--mine"])
    manager = ConfigManager(config_file_path=str(yaml), allow_cli_override=False, allow_yaml_extensions=True)
    assert manager.load_and_parse().training.lr == 0.05


def test_what_it_cannot_read_is_said(yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py"])
    with pytest.raises(UsageError, match="names no YAML file"):
        ConfigManager().load_and_parse()
    with pytest.raises(ConfigError, match="dict is not the class of this suite's configuration"):
        ConfigManager(config_class=dict)
