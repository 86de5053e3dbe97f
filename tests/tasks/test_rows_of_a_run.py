"""`mm evaluate` and `mm infer` read and show rows as the run did that trained the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder, RowsView
from mindspeed_mm.tasks import train as training
from mindspeed_mm.tasks.answer import infer
from mindspeed_mm.tasks.answer.view import rows_view
from mindspeed_mm.tasks.evaluate import evaluate
from mindspeed_mm.tasks.export import export
from mindspeed_mm.tasks.model_source import ModelSource, resolve_model
from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest
from mindspeed_mm.tasks.requests.export import ExportRequest
from mindspeed_mm.tasks.requests.infer import InferRequest
from tests.fsdp.data.conftest import picture
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import tiny_config

ATTR = {"formatting": "alpaca", "prompt": "asked", "query": "more", "response": "said", "images": "shots"}
MOST = 1024
"""Pixels: a quarter of what the folder's processor takes."""


def write_rows(path: Path, *, answered: bool = True) -> Path:
    rows: list[dict[str, Any]] = []
    for number in range(4):
        picture(64, 64, seed=number).save(path.parent / f"{number}.png")
        said = {"said": "seven"} if answered else {}
        rows.append({"asked": "<image>Which digit is this?", "more": "", "shots": [f"{number}.png"], **said})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on alpaca rows, with a limit on pictures."""
    folder = tmp_path_factory.mktemp("run")
    make_tiny_qwen3_vl(folder / "model")
    rows = write_rows(folder / "rows.jsonl")
    config = tiny_config(folder)
    param = config["data"]["dataset_param"]
    param["attr"] = ATTR
    param["basic_parameters"]["dataset"] = str(rows)
    param.setdefault("preprocess_parameters", {})["image_max_pixels"] = MOST
    config["training"] |= {"train_iters": 2, "save": str(folder / "run"), "micro_batch_size": 1}
    config["model"]["model_name_or_path"] = str(folder / "model")
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    training.run(folder / "run.yaml")
    return folder / "run"


@pytest.mark.edge("N1")
def test_a_run_and_its_exported_folder_see_what_training_saw(run: Path, tmp_path: Path) -> None:
    from transformers import AutoProcessor  # after the guard, which the helpers call

    exported = export.run(ExportRequest(run, tmp_path / "hf")).folder
    assert AutoProcessor.from_pretrained(exported).image_processor.size["longest_edge"] == MOST
    base = AutoProcessor.from_pretrained(run.parent / "model").image_processor.size["longest_edge"]
    assert base > MOST
    source = resolve_model(run)
    for folder, view in ((exported, None), (source.folder, rows_view(source))):
        encoder = QuestionEncoder(folder, view)
        question = encoder.encode(
            infer.ask("?", [MediaItem("image", str(run.parent / "0.png"))]).sample, encoder.media(run.parent)
        )
        assert [int(n) for n in encoder.collate([question])["image_grid_thw"].prod(-1)] == [MOST // 8**2]


@pytest.mark.edge("R9")
def test_rows_that_train_are_evaluated_and_answered(run: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "held.jsonl")
    assert evaluate.run(EvaluateRequest(str(run), data=rows, out=tmp_path / "eval", max_new_tokens=2)).overall.n == 4
    asked = write_rows(tmp_path / "asked.jsonl", answered=False)
    assert infer.run(InferRequest(run, data=asked, out=tmp_path / "out.jsonl", max_new_tokens=2)).answered == 4


@pytest.mark.edge("R9")
def test_a_model_folder_reads_rows_as_a_named_configuration_says(run: Path, tmp_path: Path) -> None:
    rows, model = write_rows(tmp_path / "held.jsonl"), run.parent / "model"
    config = run.parent / "run.yaml"
    assert (
        evaluate.run(
            EvaluateRequest(str(model), data=rows, out=tmp_path / "eval", max_new_tokens=2, config=config)
        ).overall.n
        == 4
    )
    usual = tmp_path / "usual.jsonl"
    usual.write_text(
        json.dumps({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]})
    )
    assert rows_view(ModelSource(model), config).row_format(rows).formatting == "alpaca"
    assert rows_view(ModelSource(model), config).row_format(usual) == RowFormat()


def test_what_a_run_on_pairs_is_asked_needs_no_second_answer(tmp_path: Path) -> None:
    plain, pairs = tmp_path / "plain.jsonl", tmp_path / "pairs.jsonl"
    row = {"messages": [{"role": "user", "content": "?"}]}
    plain.write_text(json.dumps(row))
    pairs.write_text(json.dumps(row | {"chosen": "!", "rejected": "."}))
    view = RowsView(DatasetParam.model_validate({"attr": {"ranking": True, "messages": "messages"}}))
    assert not view.row_format(plain).ranking and view.row_format(pairs).ranking
