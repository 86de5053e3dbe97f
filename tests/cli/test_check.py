"""`mm check`: the order of its stages, what each finds, and what goes on when one fails."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from mindspeed_mm.checkpoint.layout import draft_folder
from mindspeed_mm.cli.main import run
from mindspeed_mm.core.errors import DataError, ModelFolderError, Problem, first_problems
from mindspeed_mm.fsdp import data
from mindspeed_mm.fsdp.data.dataset import as_mm_dataset
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.train.run import data as run_data
from mindspeed_mm.fsdp.train.run import start_checks
from mindspeed_mm.tasks.check import check
from mindspeed_mm.tasks.check import memory as memory_stage
from tests.helpers.refusal import make_base
from tests.helpers.runs import mm, train
from tests.helpers.tiny_generator_run import generator_config, make_pictures
from tests.helpers.tiny_generators import make_tiny_flux
from tests.helpers.tiny_run import make_tiny_run
from tests.tasks.extraction_run import SIZES, make_run, write_yaml


class Model(nn.Module):
    """Takes `input_ids`, and a mask if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        return input_ids


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins for the model hub and the data: what they give can be changed by a test."""
    given: dict[str, Any] = {"model": Model(), "batch": {"input_ids": 0, "shift_labels": 0, "sample_ids": []}}
    monkeypatch.setattr(data, "build_mm_dataset", lambda *_, **__: (as_mm_dataset([1]), given.get("validation")))
    monkeypatch.setattr(run_data, "build_mm_dataloader", lambda *_, **__: Loader(given))
    monkeypatch.setattr(ModelHub, "build", lambda *_, **__: give(given["model"]))
    monkeypatch.setattr(memory_stage, "predict", lambda *_: ([], {}, []))  # it builds the model again
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return given


class Loader:
    """Gives one batch."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given, self.batching = given, dict[str, Any]()
        self.repeat_note, self.dataset, self.order = "", as_mm_dataset([1]), SimpleNamespace(dropped="")

    def steps_for(self, epochs: float) -> int:
        return 10

    def __iter__(self) -> Any:
        return iter([[give(self._given["batch"])]])


def give(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


def write(folder: Path, text: str = "") -> Path:
    path = folder / "run.yaml"
    path.write_text(f"model: {{model_name_or_path: {folder}}}\n{text}")
    return path


ALL = [
    "configuration",
    "plugins",
    "features",
    "paths",
    "module patterns",
    "first samples",
    "resume",
    "batch keys",
    "samples",
    "first held-out question",
    "memory",
]


def test_everything_passes_in_order(parts: dict[str, Any], tmp_path: Path) -> None:
    result = check.run(write(tmp_path))
    assert (result.passed, result.findings, result.exit_code) == (ALL, [], 0)


def test_config_only_builds_nothing(parts: dict[str, Any], tmp_path: Path) -> None:
    parts["model"] = AssertionError("built")
    result = check.run(write(tmp_path, "inference: {seed: 7}\n"), config_only=True)
    assert (result.passed, result.exit_code) == (["configuration"], 0)


def test_a_wrong_configuration_stops_what_needs_it(parts: dict[str, Any], tmp_path: Path) -> None:
    result = check.run(write(tmp_path, "training: {lr: x, seed: y}\n"))
    assert [finding.problem.key for finding in result.findings] == ["training.lr", "training.seed"]
    assert result.passed == []
    assert list(result.skipped) == ALL[1:]
    assert result.exit_code == 2


def test_all_that_can_be_found_is_found(parts: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    parts["batch"] = DataError("no image", where="rows.json:3")
    text = (
        "features: {recompute: true, recompute_plan: {apply_modules: [layer]}}\n"
        "inference: {seed: 7}\n"
        f"training: {{save: {tmp_path / 'file'}}}\n"
        "parallel: {fsdp_plan: {apply_modules: [layer.0], ignored_modules: [x]}}\n"
    )
    result = check.run(write(tmp_path, text))
    found = {finding.stage: [] for finding in result.findings}
    for finding in result.findings:
        found[finding.stage].append((finding.problem.key or finding.problem.where, finding.exit_code))
    assert found == {
        "features": [("inference.seed", 2)],
        "paths": [("training.save", 2)],
        "module patterns": [
            ("features.recompute_plan.apply_modules", 2),
            ("parallel.fsdp_plan.apply_modules", 2),
            ("parallel.fsdp_plan.ignored_modules", 2),
        ],
        "first samples": [("rows.json:3", 4)],
    }
    assert result.skipped == {
        "resume": "paths",
        "batch keys": "module patterns",
        "samples": "module patterns",
        "first held-out question": "paths",
        "memory": "features",
    }
    assert result.findings[0].problem.where.endswith("run.yaml:3:19")
    assert "'layers.0'" in result.findings[2].problem.way_out


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": 0, "pixels": 0, "shift_labels": 0}, "does not take pixels, which the batch holds"),
        ({"attention_mask": 0, "sample_ids": []}, "needs input_ids, which the batch lacks"),
    ],
)
def test_batch_keys_that_do_not_fit_the_forward(
    batch: dict[str, Any], message: str, parts: dict[str, Any], tmp_path: Path
) -> None:
    parts["batch"] = batch
    (finding,) = check.run(write(tmp_path)).findings
    assert message in finding.problem.what
    assert "attention_mask" in finding.problem.way_out


def test_a_missing_model_folder_is_a_fault_of_the_data(parts: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {model_name_or_path: nowhere}\n")
    result = check.run(path)
    assert (result.findings[0].problem.key, result.exit_code) == ("model.model_name_or_path", 4)


def test_parallel_sizes_are_checked_for_the_ranks_asked_for(parts: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, "parallel: {fully_shard_parallel_size: 2}\n")
    assert "parallel sizes" in check.run(path, config_only=True, nproc=4).passed
    (finding,) = check.run(path, config_only=True, nproc=3).findings
    assert finding.problem.where.endswith("run.yaml:2:39")


PLUGIN = """
from torch import nn
from mindspeed_mm.fsdp.utils.register import data_register, model_register

@model_register.register("outside_model", keys={"width": 4})
class OutsideModel(nn.Module):
    pass

@data_register.register("outside_rows", keys={"rows": 1})
class OutsideRows:
    pass
"""


def test_a_plugins_keys_are_unchecked_before_and_checked_after_it_is_imported(
    parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{model_id: outside_model, model_name_or_path: {tmp_path}, widtt: 3}}\n"
        "data: {dataset_param: {dataset_type: outside_rows, rows: 5}}\ntraining: {plugin: [outside_plugin]}\n"
    )
    before = check.run(path, config_only=True)
    assert before.unchecked == ["model.widtt", "data.dataset_param.rows"]
    assert before.exit_code == 0
    (finding,) = check.run(path).findings
    assert (finding.stage, finding.problem.key) == ("plugins", "model.widtt")
    assert "'width'" in finding.problem.way_out


def test_printed(parts: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "training: {save_steps: 3}\nmodeel: {}\n")
    assert run(["check", str(path), "--config-only"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{path}: 1 problem"
    assert lines[1] == f"  {path}:3:1  modeel  unknown key. Did you mean 'model'?"
    path = write(tmp_path, "training: {save_steps: 3}\n")
    assert run(["check", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{path}: ok"
    assert lines[1].startswith(f"  warning: {path}:2:12  training.save_steps")
    assert lines[-1] == f"  passed: {', '.join(ALL)}"


def test_a_headline_stands_over_its_problems_and_is_none(
    parts: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    headline, path = "2 weights are not stored. Copy the folder again.", write(tmp_path)
    parts["model"] = ModelFolderError(headline, problems=[Problem("is missing", key=key) for key in ("a", "b")])
    assert run(["check", str(path)]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [f"{path}: 2 problems", f"  {headline}", "  a  is missing", "  b  is missing"]
    assert sum(headline in line for line in lines) == 1
    result = check.run(path)
    assert ([problem.key for problem in result.problems], result.headlines) == (["a", "b"], [headline])


def test_problems_that_are_only_counted_are_counted_in(
    parts: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, found = write(tmp_path), [Problem("is missing", key=key) for key in "abcdefgh"]
    parts["model"] = ModelFolderError("8 weights are not stored.", problems=first_problems(found))
    assert run(["check", str(path)]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{path}: 8 problems" and lines[7] == "     and 3 more"
    assert run(["check", str(path), "--json"]) == 4
    counts = [finding["count"] for finding in json.loads(capsys.readouterr().out)["findings"]]
    assert counts == [1, 1, 1, 1, 1, 3]


@pytest.mark.edge("U5")
def test_what_waits_for_one_cause_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(write(tmp_path, "training: {lr: x}\n"))]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"  skipped until configuration passes: {', '.join(ALL[1:])}"
    assert sum("skipped" in line for line in lines) == 1


def test_no_model_at_all_is_a_fault_of_the_configuration_as_in_training(tmp_path: Path) -> None:
    yaml = tmp_path / "run.yaml"
    yaml.write_text("data: {dataset_param: {basic_parameters: {dataset: rows.jsonl}}}\ntraining: {train_iters: 1}\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    checked, trained = mm("check", yaml), mm("train", yaml)
    assert checked.code == trained.code == 2
    assert "model.model_name_or_path" in checked.out and "is not given. Name the model's folder." in checked.out


@pytest.mark.edge("U5")
def test_an_absent_model_folder_is_one_problem(tmp_path: Path) -> None:
    path = make_tiny_run(tmp_path / "run", model={"model_name_or_path": "gone"})
    assert [finding.stage for finding in check.run(path).findings] == ["paths"]


def test_json(parts: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(write(tmp_path, "inference: {seed: 7}\n")), "--json"]) == 2
    record = json.loads(capsys.readouterr().out)
    assert record["exit_code"] == 2
    assert record["findings"][0]["key"] == "inference.seed"
    assert record["findings"][0]["stage"] == "features"


def test_a_stage_gets_the_data_section_as_configured(
    parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def build(dataset_param: DatasetParam, **options: Any) -> tuple[Any, None]:
        seen.append((dataset_param.preprocess_parameters.model_name_or_path, options["seed"]))
        return as_mm_dataset([1]), None

    monkeypatch.setattr(data, "build_mm_dataset", build)
    check.run(write(tmp_path, "training: {seed: 5}\n"))
    assert seen == [(str(tmp_path), 5)]


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("tiny"))


def test_a_real_model_and_real_rows_pass(tiny_run: Path) -> None:
    result = check.run(tiny_run)
    assert (result.findings, result.passed) == ([], ALL)


def test_a_failing_validation_set_is_found_where_a_run_validates(tiny_run: Path, tmp_path: Path) -> None:
    rows = tmp_path / "val.jsonl"
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "A box."}]
    rows.write_text(json.dumps({"messages": turns, "images": ["no.png"]}) + "\n")
    words = [f"data.dataset_param.basic_parameters.val_dataset={rows}"]
    (finding,) = check.run(tiny_run, [*words, "training.val_interval=1"]).findings
    assert (finding.stage, finding.exit_code, rows.name in finding.problem.where) == ("first samples", 4, True)
    assert check.run(tiny_run, words).findings == []


def test_before_features_are_extracted_their_media_are_checked(tmp_path: Path) -> None:
    path = make_run(tmp_path, count=4)
    result = check.run(path)
    assert (result.findings, result.passed) == ([], ALL)
    (warning,) = result.warnings
    assert "Run mm extract" in warning
    assert not (tmp_path / "features").exists()
    (tmp_path / "pictures" / "0.png").write_bytes(b"<html>")
    (finding,) = check.run(path).findings
    assert (finding.stage, finding.exit_code) == ("first samples", 4)
    (alone,) = check.run(path, ["data.dataset_param.basic_parameters.dataset=null"]).findings
    assert "Run mm extract" in alone.problem.way_out


def test_faults_of_a_real_model_and_real_rows(tiny_run: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "<image>?"}], "images": ["no.png"]}\n'
    )
    overrides = [
        f"data.dataset_param.basic_parameters.dataset={tmp_path / 'rows.jsonl'}",
        "model.freeze=[model.vissual]",
        "parallel.fsdp_plan.apply_modules=['model.language_model.layer.{*}']",
    ]
    found = {finding.problem.key or finding.stage: finding for finding in check.run(tiny_run, overrides).findings}
    assert "'model.visual'" in found["model.freeze"].problem.way_out
    assert "'model.language_model.layers.0'" in found["parallel.fsdp_plan.apply_modules"].problem.way_out
    (data,) = (finding for finding in found.values() if finding.stage == "first samples")
    assert data.exit_code == 4
    assert "rows.jsonl" in data.problem.where


def test_a_save_under_way_is_left_alone(tmp_path: Path) -> None:
    """The run that is checked may be training at this moment."""
    yaml = make_tiny_run(tmp_path)
    train(yaml, tmp_path / "run", "training.train_iters=1")
    draft = draft_folder(tmp_path / "run", 2)
    draft.mkdir()
    assert mm("check", yaml, f"training.save={tmp_path / 'run'}").code == 0
    assert draft.is_dir()
    train(yaml, tmp_path / "run", "training.train_iters=2")
    assert not draft.exists()


STARTS = (("check", ()), ("train", ("--dry-run",)))


def test_what_this_device_cannot_compute_is_a_warning(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "supports_bf16", lambda: False)
    result = check.run(tiny_run, ["parallel.fsdp_plan.param_dtype=bf16"])
    assert result.findings == [] and "does not compute in bf16" in result.warnings[0]


@pytest.mark.edge("R4")
def test_a_start_is_checked_with_the_options_that_it_will_be_given(tiny_run: Path, tmp_path: Path) -> None:
    """What `mm train` takes under them, `mm check` does."""
    save = tmp_path / "run"
    train(tiny_run, save, "training.train_iters=1")
    again = (tiny_run, f"training.load={save}", f"training.save={tmp_path / 'new'}", "training.seed=8")
    for words, code in (((), 4), (("--weights-only",), 0)):
        assert [mm(verb, *again, *words, *extra).code for verb, extra in STARTS] == [code, code]
    next(save.glob("iter_*/trainer_state.json")).write_text("[]")
    broken = (tiny_run, f"training.save={save}")
    for words, code in (((), 4), (("--allow-fresh",), 0)):
        assert [mm(verb, *broken, *words, *extra).code for verb, extra in STARTS] == [code, code]


@pytest.mark.edge("R4")
def test_a_reference_that_follows_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    yaml = make_base(tmp_path, "pairs")
    train(yaml, tmp_path / "run", "training.train_iters=1")
    words = (f"training.load={tmp_path / 'run'}", "--weights-only")
    for reference, code in ((), 2), (("posttrain.reference.sync_steps=2",), 0):
        assert [mm(verb, yaml, *words, *reference, *extra).code for verb, extra in STARTS] == [code, code]


@pytest.mark.edge("R4")
def test_an_epoch_of_sizes_that_cannot_be_gone_on_with(tmp_path: Path) -> None:
    """Steps of as many samples, dealt otherwise, take others of them."""
    make_tiny_flux(tmp_path / "model")
    make_pictures(tmp_path, 13, SIZES)
    config = generator_config(tmp_path, {"buckets": [f"{height}x{width}" for height, width in SIZES]})
    yaml, save = write_yaml(tmp_path / "run.yaml", config), tmp_path / "run"
    split = ("training.micro_batch_size=1", "training.gradient_accumulation_steps=4")
    train(yaml, save, "training.train_iters=1", *split)
    words = (f"training.save={save}", "training.micro_batch_size=4", "training.gradient_accumulation_steps=1")
    trained, checked = mm("train", yaml, *words), mm("check", yaml, *words, "--nproc", 1)
    assert (trained.code, checked.code) == (4, 4), checked.out
    assert "would not take just them" in trained.err and "would not take just them" in checked.out
    assert mm("check", yaml, *words, "--nproc", 1, "--accept-data-change").code == 0
