"""The memory stage of `mm check`: shipped examples, any number of ranks, memory that does not suffice."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from mindspeed_mm.cli.check import command
from mindspeed_mm.fsdp.utils import device
from mindspeed_mm.fsdp.utils.register import model_register
from mindspeed_mm.tasks.check import check
from tests.helpers.logged import logged
from tests.helpers.released_rows import ROWS, write_run
from tests.helpers.tiny_run import make_tiny_run

EXAMPLES = Path(__file__).parents[2] / "examples"


def few_scans(make: Any) -> Callable[[], Any]:
    real = make.load_scans
    return lambda: real()[:100]


def make_example(name: str, script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example's folder, from its first scans."""
    monkeypatch.syspath_prepend(str(EXAMPLES / name))
    make = importlib.import_module(script)
    monkeypatch.setattr(make, "load_scans", few_scans(make))
    if name == "digits":
        monkeypatch.setattr(make, "READING_ROWS", {"train": 40, "validation": 4, "test": 4})
        make.make_digits(folder)
    else:
        make.make_data(folder / "data")
        make.write_model_folder(folder / "model")


@pytest.mark.parametrize(
    ("name", "script", "config"),
    [
        ("digits", "mindspeed_mm.quickstart.make_digits", "digits_tiny_config.yaml"),
        ("digits_flux", "make_digits_flux", "digits_flux_config.yaml"),
        ("moving_digits_wan", "make_moving_digits", "moving_digits_wan_config.yaml"),
    ],
)
def test_shipped_examples(name: str, script: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_example(name, script, tmp_path / "runs" / name, monkeypatch)
    monkeypatch.chdir(tmp_path)
    result = check.run(EXAMPLES / name / config)
    assert "memory" in result.passed, (result.findings, result.skipped)
    record = result.predicted_memory
    assert 2**20 < record["peak_bytes"] < 2**30  # type: ignore[operator]
    assert record["activations_bytes"] > 0 and not any("simulated" in each for each in record["approximations"])  # type: ignore[operator, union-attr, attr-defined]


def test_more_ranks_hold_less_each(tmp_path: Path) -> None:
    yaml = make_tiny_run(tmp_path)
    one, eight = (check.run(yaml, nproc=ranks).predicted_memory for ranks in (1, 8))
    assert eight["optimizer_bytes"] < one["optimizer_bytes"] / 4  # type: ignore[operator]
    assert eight["ranks"] == 8


def test_text_and_json_and_a_warning_where_memory_does_not_suffice(tmp_path: Path) -> None:
    yaml = make_tiny_run(tmp_path)
    with mock.patch.object(device, "memory_total_bytes", lambda: 2**20):
        text = CliRunner().invoke(command, [str(yaml)]).output
        record = json.loads(CliRunner().invoke(command, [str(yaml), "--json"]).output)
    assert "predicted peak" in text and "warning: the first batch needs" in text and "this host has 1.0 MiB" in text
    assert record["predicted_memory"]["device_bytes"] == 2**20
    assert sum(record["predicted_memory"]["peak_by_category"].values()) == record["predicted_memory"]["peak_bytes"]


def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (EXAMPLES.parent / "docs" / "memory.md").read_text(encoding="utf-8")
    lines = [line.partition("#")[0].split() for line in page.splitlines() if line.startswith("mm check run.yaml")]
    make_tiny_run(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text() * 8)  # 64 ranks want more
    monkeypatch.chdir(tmp_path)
    assert len(lines) == 3
    for _, _, *words in lines:
        result = CliRunner().invoke(command, words)
        assert result.exit_code == 0 and "predicted" in result.output, result.output


MISFIT = """\
from transformers import Qwen3VLForConditionalGeneration

from mindspeed_mm.fsdp.utils.register import model_register


@model_register.register("misfit")
class Misfit(Qwen3VLForConditionalGeneration):
    def forward(self, input_ids=None, **inputs):
        made = super().forward(input_ids=input_ids, **inputs)
        made.logits = made.logits + made.logits[:, :3]  # line 10
        return made
"""


@pytest.fixture
def run_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], tuple[str, ...]]:
    """The warnings of a run whose model is the plugin of that name and text."""
    monkeypatch.setattr(model_register, "_entries", dict(model_register._entries))
    monkeypatch.setattr(model_register, "_config_keys", dict(model_register._config_keys))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yaml = make_tiny_run(tmp_path)
    assert not check.run(yaml).warnings

    def warnings_with(name: str, text: str) -> tuple[str, ...]:
        (tmp_path / f"{name}.py").write_text(text)
        return tuple(check.run(yaml, [f"training.plugin=[{name}.py]", "model.model_id=misfit"]).warnings)

    return warnings_with


def test_a_forward_that_does_not_take_the_shapes_of_the_batch_is_told(
    run_with: Callable[[str, str], tuple[str, ...]],
) -> None:
    with logged() as records:
        (warning,) = run_with("misfitting", MISFIT)
    assert warning.startswith("the model's code fails on the first batch, as training may: ")
    assert "(misfitting.py:10)" in warning
    assert not [record for record in records if record.name.startswith("torch")]


def test_a_forward_that_names_a_key_of_the_batch_otherwise_is_told(
    run_with: Callable[[str, str], tuple[str, ...]],
) -> None:
    """The key goes into its **kwargs; Python's error alone names neither file nor line."""
    (warning,) = run_with("unnamed", MISFIT.replace("made.logits[:, :3]", 'inputs.get("grid_hw").sum()'))
    assert warning.startswith("the plugin's code fails on the first batch, as training may: AttributeError: ")
    assert re.search(r"unnamed\.py:10\)\. Compare the arguments of its forward", warning)


def test_a_processor_that_writes_other_numbers_of_tokens_than_the_model_makes_features_is_a_problem(
    tmp_path: Path,
) -> None:
    yaml = write_run(ROWS["llava"], tmp_path)
    assert not check.run(yaml).problems
    settings = tmp_path / "model" / "processor_config.json"
    content = json.loads(settings.read_text())
    settings.write_text(json.dumps(content | {"patch_size": content["patch_size"] // 2}))
    (problem,) = check.run(yaml).problems
    assert re.search(r"than the model makes features of them: Image features and image tokens .* \d+", str(problem))
