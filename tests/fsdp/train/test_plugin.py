"""A plugin from outside the package trains from one YAML, its keys are checked, and what is wrong with it is said."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_mm.cli.main import run
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.provider.live import LIVE
from mindspeed_mm.fsdp.train.run.record import trusted_code
from mindspeed_mm.fsdp.utils.register import Registry
from mindspeed_mm.training import get_args

YAML = """\
model: {model_id: toy_lm, train_from_scratch: true, toy_width: 12}
data: {dataset_param: {dataset_type: toy_rows, toy_count: 40}, dataloader_param: {num_workers: 0}}
training: {plugin: [toy_plugin], lr: 0.05, micro_batch_size: 8, train_iters: 30, log_interval: 1}
"""


@pytest.fixture
def yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "plugins"))
    path = tmp_path / "toy.yaml"
    path.write_text(YAML)
    return path


def test_plugin_trains(yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", str(yaml), "-v", f"training.save={tmp_path / 'save'}"]) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "save" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert "the model's own, as the mean over label tokens" in capsys.readouterr().out


ASKING = """
from mindspeed_mm.fsdp.models.base_model import BaseModel
from mindspeed_mm.fsdp.utils.register import model_register
from mindspeed_mm.training import get_args
from toy_plugin import ToyLM

ASKED = []

@model_register.register("asking_lm", keys={"toy_width": 8, "toy_vocabulary": 16})
class AskingLM(ToyLM):
    def __init__(self, config):
        super().__init__(config)
        args = get_args()
        ASKED.append((args.moe_grouped_gemm, args.ep_dispatcher, args.micro_batch_size))

    def forward(self, input_ids, labels):
        ASKED.append(get_args().lr)
        return super().forward(input_ids, labels)
"""


def test_a_model_asks_for_arguments_as_in_the_text_suite(
    yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Document 004: `get_args().moe_grouped_gemm` and `.ep_dispatcher`, of a run that a YAML started."""
    monkeypatch.setattr(LIVE, "args", None)  # flags of an earlier test
    (tmp_path / "asking_plugin.py").write_text(ASKING)
    yaml.write_text(YAML.replace("toy_lm", "asking_lm").replace("[toy_plugin]", f"[{tmp_path / 'asking_plugin.py'}]"))
    wants = ["moe_grouped_gemm=true", "ep_dispatcher=fused", "training.train_iters=1"]
    assert run(["train", str(yaml), *wants]) == 0
    asked = sys.modules["asking_plugin"].ASKED
    assert asked[0] == (True, "alltoall", 8) and asked[-1] == 0.05
    with pytest.raises(ConfigError, match="there are no arguments yet"):
        get_args()
    assert run(["check", str(yaml), *wants]) == 0


@pytest.mark.edge("BU7")
def test_a_plain_module_is_exported_as_its_weights(
    yaml: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", str(yaml), f"training.save={tmp_path / 'save'}", "training.train_iters=3"]) == 0
    assert run(["export", str(tmp_path / "save"), str(tmp_path / "out"), "--dtype", "fp64"]) == 0
    assert "ToyLM came from no folder" in "".join(capfd.readouterr())
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith(".")) == [
        "README.md", "model.safetensors", "resolved.yaml"
    ]  # fmt: skip
    from toy_plugin import ToyLM

    model = ToyLM(SimpleNamespace(toy_width=12, toy_vocabulary=16)).double()
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    losses = [json.loads(line) for line in (tmp_path / "save" / "metrics.jsonl").read_text().splitlines()]
    rows = torch.stack([(torch.arange(6) + first) % 16 for first in range(16)])
    assert 0 < float(model(rows, rows).loss) < losses[0]["loss"]
    (tmp_path / "save" / "run.json").unlink()
    assert run(["export", str(tmp_path / "save"), str(tmp_path / "other")]) == 2


@pytest.mark.edge("S14")
def test_the_code_that_a_run_trusts_is_recorded(yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "modeling.py").write_text("VALUE = 1")
    run_of = load_with_plugins(yaml, (f"model.model_name_or_path={folder}",)).arguments
    plugin = trusted_code(run_of.model, run_of.data, run_of.training)
    assert plugin.keys() == {"toy_plugin"} and len(plugin["toy_plugin"]) == 64
    trusting = load_with_plugins(yaml, (f"model.model_name_or_path={folder}", "model.trust_remote_code=true")).arguments
    before = trusted_code(trusting.model, trusting.data, trusting.training)
    assert before.keys() == {"toy_plugin", str(folder)}
    (folder / "modeling.py").write_text("VALUE = 2")
    after = trusted_code(trusting.model, trusting.data, trusting.training)
    assert after["toy_plugin"] == before["toy_plugin"] and after[str(folder)] != before[str(folder)]
    assert run(["train", str(yaml), f"training.save={tmp_path / 'save'}", "training.train_iters=1"]) == 0
    assert json.loads((tmp_path / "save" / "run.json").read_text())["trusted_code"] == plugin


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("toy_width: 12", "toy_widht: 12", "Did you mean 'toy_width'"),
        ("toy_width: 12", "toy_width: wide", "model.toy_width"),
        ("toy_count: 40", "toy_cuont: 40", "Did you mean 'toy_count'"),
        ("plugin: [toy_plugin]", "plugin: [toy_plugins]", "No module named 'toy_plugins'"),
        ("model_id: toy_lm", "model_id: toy_ml", "Did you mean 'toy_lm'"),
        ("dataset_type: toy_rows", "dataset_type: toy_row", "Did you mean 'toy_rows'"),
    ],
)
def test_mistakes_are_named(yaml: Path, old: str, new: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    yaml.write_text(YAML.replace(old, new))
    assert run(["train", str(yaml)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_plugin_that_fails_to_import_shows_its_cause(
    yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_plugin.py").write_text("import nothing_of_that_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yaml.write_text(YAML.replace("toy_plugin", "broken_plugin"))
    assert run(["train", str(yaml)]) == 2
    assert "No module named 'nothing_of_that_name'" in capsys.readouterr().err


def test_an_id_belongs_to_one_class() -> None:
    registry = Registry("model.model_id")
    registry.register("one")(dict)
    with pytest.raises(ConfigError, match=r"registered twice: by builtins\.dict and by builtins\.list"):
        registry.register("one")(list)
    registry.register("one")(dict)  # the same again, as a reloaded module does
    with pytest.raises(ConfigError, match="Registered: one"):
        registry.get("two")


@pytest.mark.edge("BU2")
@pytest.mark.parametrize("key", ["pixels", "latents", "prompts"])
def test_a_batch_may_use_any_key(
    key: str, yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names that generators and rollouts use, without `shift_labels`: the model is of language by its kind."""
    package = tmp_path / f"plugin_with_{key}"
    package.mkdir()
    source = (Path(__file__).parents[2] / "plugins" / "toy_plugin" / "__init__.py").read_text()
    source = source.replace('"toy_lm"', f'"lm_{key}"').replace('"toy_rows"', f'"rows_{key}"')
    source = source.replace("input_ids, labels):", f"input_ids, labels, {key}=None):")
    source = source.replace('"shift_labels": shift, ', f'"{key}": torch.ones(len(rows), 3), ')
    assert source.count(key) == 4
    (package / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = YAML.replace("toy_lm", f"lm_{key}").replace("toy_rows", f"rows_{key}").replace("toy_plugin", package.name)
    yaml.write_text(text.replace("train_iters: 30", "train_iters: 2"))
    assert run(["check", str(yaml)]) == 0, capsys.readouterr().err
    assert run(["train", str(yaml)]) == 0, capsys.readouterr().err
