"""The scripts that launches start by name: where they stand, what they do, and what they say that is not built."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm import evaluate_vlm, finetune_ocr, inference_vlm
from mindspeed_mm.fsdp.sampling.answers import scored
from mindspeed_mm.provider.launch import read_launch
from mindspeed_mm.tasks.evaluate import evaluate
from mindspeed_mm.tasks.extract import extract
from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest
from mindspeed_mm.tools.feature_extraction import get_sora_feature
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import lines
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_rows

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mindspeed_mm"
KINDS = ("pretrain", "inference", "evaluate", "finetune", "posttrain", "train")
ENTRIES = sorted(path.stem for kind in KINDS for path in PACKAGE.glob(f"{kind}_*.py"))
FEATURES = PACKAGE / "tools" / "feature_extraction"


def run(monkeypatch: pytest.MonkeyPatch, module: Any, *words: str) -> int:
    """An entry's exit code."""
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *words])
    try:
        module.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_stand_at_the_root_too(name: str) -> None:
    assert f"from mindspeed_mm.{name} import main" in (ROOT / f"{name}.py").read_text(encoding="utf-8")
    assert len((PACKAGE / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 80
    assert callable(import_module(f"mindspeed_mm.{name}").main)


def test_every_entry_of_a_launch_is_there() -> None:
    at_the_root = {path.stem for path in ROOT.glob("*.py")}
    assert at_the_root == set(ENTRIES) and len(ENTRIES) == 23
    assert {path.stem for path in FEATURES.glob("get_*.py")} == {
        f"get_{of}_feature" for of in ("sora", "hunyuan", "wan", "vace")
    }


def test_the_entry_of_the_megatron_core_back_end_trains_as_the_others_do() -> None:
    entry = import_module("mindspeed_mm.mcore.models.qwen3_5.pretrain_qwen3_5")
    assert entry.main is import_module("mindspeed_mm.pretrain_transformers").main


def write_json(folder: Path, name: str, content: Any) -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def test_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_qwen3_vl(tmp_path / "model")
    rows = make_rows(tmp_path, 3)
    settings = {"dataset_path": str(rows), "result_output_path": str(tmp_path / "scores")}
    model = write_json(tmp_path, "evaluate", settings | {"generation_config": {"max_new_tokens": 2}})
    assert run(monkeypatch, evaluate_vlm, "--mm-model", model, "--load", str(folder)) == 0
    expected = evaluate.run(EvaluateRequest(str(folder), data=rows, out=tmp_path / "expected", max_new_tokens=2))
    assert capsys.readouterr().out.splitlines() == expected.lines()
    assert (tmp_path / "scores" / scored.SAMPLES).read_text() == (tmp_path / "expected" / scored.SAMPLES).read_text()
    monkeypatch.setenv("RANK", "1")
    assert run(monkeypatch, inference_vlm, "--mm-model", model, "--load", str(folder)) == 0
    assert capsys.readouterr().out == ""


def evaluate_as_rank(model: str, folder: str) -> str:
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(said):
        assert run(monkeypatch, evaluate_vlm, "--mm-model", model, "--load", folder) == 0
    return said.getvalue()


@pytest.mark.slow
def test_ranks_share_the_rows(tmp_path: Path) -> None:
    folder, rows = make_tiny_qwen3_vl(tmp_path / "model"), make_rows(tmp_path, 3)
    settings = {"dataset_path": str(rows), "result_output_path": str(tmp_path / "scores")}
    model = write_json(tmp_path, "evaluate", settings | {"generation_config": {"max_new_tokens": 2}})
    expected = evaluate.run(EvaluateRequest(str(folder), data=rows, out=tmp_path / "expected", max_new_tokens=2))
    said = run_ranks(2, evaluate_as_rank, str(model), str(folder))
    assert said == ["\n".join(expected.lines()) + "\n", ""]
    assert (tmp_path / "scores" / scored.SAMPLES).read_text() == (tmp_path / "expected" / scored.SAMPLES).read_text()


def test_scores_of_a_published_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_qwen3_vl(tmp_path / "model")
    (tmp_path / "AI2D_TEST.tsv").write_text("index\tquestion\tA\tB\tanswer\n1\twhat?\tone\ttwo\tB\n")
    settings = {"dataset_path": str(tmp_path / "AI2D_TEST.tsv"), "evaluation_dataset": "ai2d_test"}
    settings |= {"result_output_path": str(tmp_path / "scores"), "generation_config": {"max_new_tokens": 2}}
    model = write_json(tmp_path, "evaluate", settings)
    assert run(monkeypatch, evaluate_vlm, "--mm-model", model, "--load", str(folder)) == 0
    assert capsys.readouterr().out.startswith("AI2D: 0.0 % (n=1, ")
    assert json.loads((tmp_path / "scores" / scored.RESULTS).read_text())["benchmark"] == "ai2d_test"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "evaluate.json  dataset_path  is not given"),
        ({"dataset_path": "AI2D_TEST.tsv"}, "AI2D_TEST.tsv is the table of a set. Name its set as evaluation_dataset"),
        (
            {"dataset_path": "AI2D_TEST.tsv", "evaluation_dataset": "ai2d_tst"},
            "no set 'ai2d_tst' is known. Did you mean 'ai2d_test'?",
        ),
    ],
)
def test_rows_that_cannot_be_scored(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, str],
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path, "evaluate", settings)
    assert run(monkeypatch, evaluate_vlm, "--mm-model", "evaluate.json", "--load", "folder") == 2
    assert line in capsys.readouterr().err
    assert run(monkeypatch, evaluate_vlm, "--mm-model", "evaluate.json") == 2
    assert "--load  no model is named" in capsys.readouterr().err


def test_a_script_of_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_qwen3_vl(tmp_path / "model")
    rows = make_rows(tmp_path, 4)
    words = f"--num-workers 0 --seed 1234 --no-shuffle --seq-length 512 --micro-batch-size 1 --global-batch-size 2 \
        --train-iters 2 --lr 5e-6 --clip-grad 0 --warmup-ratio 0 --weight-decay 1e-2 --log_tps --log-interval 1 \
        --data-path {rows} --data-dir {tmp_path} --load {folder} --save {tmp_path / 'run'}"
    assert run(monkeypatch, finetune_ocr, *words.split()) == 0
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl") if "loss" in line] == [1, 2]


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "features.json")  # tells of options
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    yaml = make_tiny_generator_run(tmp_path, "t2v")
    extract.run(yaml, out=tmp_path / "by_yaml", batch_size=2)
    model = {
        "ae": {"from_pretrained": str(tmp_path / "model" / "vae"), "dtype": "fp32"},
        "text_encoder": [{"dtype": "fp32"}],
    }
    dataset = {
        "dataset_type": "t2v",
        "basic_parameters": {"data_path": str(tmp_path / "rows.jsonl"), "data_folder": str(tmp_path)},
        "preprocess_parameters": {"num_frames": 5, "max_height": 16, "max_width": 16, "frame_interval": 1},
    }
    words = ["--micro-batch-size", "2", "--num-workers", "0"]
    words += ["--mm-model", write_json(tmp_path, "model", model)]
    words += ["--mm-data", write_json(tmp_path, "data", {"dataset_param": dataset})]
    assert run(monkeypatch, get_sora_feature, *words) == 2
    assert "sorafeature.save_path  is not given" in capsys.readouterr().err
    tools = write_json(tmp_path, "tools", {"sorafeature": {"save_path": str(tmp_path / "by_flags")}})
    assert run(monkeypatch, get_sora_feature, *words, "--mm-tool", tools) == 0
    assert "by_flags" in capsys.readouterr().out
    by_flags, by_yaml = contents(tmp_path / "by_flags"), contents(tmp_path / "by_yaml")
    assert by_flags.keys() == by_yaml.keys() and any(name.endswith(".safetensors") for name in by_flags)
    assert by_flags == by_yaml


def test_the_type_of_encoders() -> None:
    assert get_sora_feature.compute_type({"ae": {"dtype": "bf16"}, "text_encoder": [{"dtype": "bf16"}]}) == "bf16"
    assert get_sora_feature.compute_type({"ae": {"dtype": "fp32"}, "text_encoder": {"dtype": "bf16"}}) is None
    assert get_sora_feature.compute_type({"ae": {"dtype": "fp16"}}) is None
    assert get_sora_feature.compute_type({}) is None


def test_the_tools_that_scripts_name_are_there() -> None:
    tools = json.loads((PACKAGE / "tools" / "tools.json").read_text(encoding="utf-8"))
    assert tools["sorafeature"]["save_path"] and not tools["profile"]["enable"]


@pytest.mark.parametrize(
    ("entry", "trains"),
    [("pretrain_vlm.py", True), ("./mindspeed_mm/tools/feature_extraction/get_wan_feature.py", False),
     ("inference_sora.py", False), ("evaluate_vlm.py", False)],
)  # fmt: skip
def test_what_trains(entry: str, trains: bool) -> None:
    assert read_launch(["torchrun", "--nnodes", "1", entry, "--seed", "1"], {}).trains is trains
