"""`mm data` opens the rows of a run that samples from prompts as the run itself does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.run.data import prompts_of
from mindspeed_mm.tasks.data import check, preview, stats
from mindspeed_mm.tasks.data.opening import open_data
from mindspeed_mm.tasks.data.words import Paint, preview_lines
from mindspeed_mm.tasks.requests.data import DataCheckRequest, DataPreviewRequest, DataStatsRequest
from tests.fsdp.data.row_formats import FORMATS, PICTURE, QUESTION
from tests.helpers.tiny_run import make_tiny_run

pytestmark = pytest.mark.edge("BR7")
PROMPTS = ("verl", "prompts", "messages", "Alpaca", "question and answer", "RLAIF-V")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """GRPO on verl's parquet, its pictures as bytes, and on rows of other trainers."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq
    from PIL import Image

    posttrain = {"method": "grpo", "grpo": {"num_generations": 2}, "rewards": [{"name": "exact_match"}]}
    yaml = make_tiny_run(tmp_path, posttrain=posttrain)
    Image.new("RGB", (32, 32), "red").save(tmp_path / PICTURE)
    verl = [FORMATS["verl"].row(True) | {"images": [{"bytes": (tmp_path / PICTURE).read_bytes()}]}] * 4
    pq.write_table(pa.Table.from_pylist(verl), tmp_path / "verl.parquet")
    rows = [FORMATS[name].row(media) for name in PROMPTS for media in (False, True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return yaml


def words(folder: Path, *files: str) -> list[str]:
    named = ",".join(str(folder / file) for file in files)
    return [f"data.dataset_param.basic_parameters.dataset={json.dumps(named)}", "data.dataset_param.attr=null"]


@pytest.mark.parametrize("files", [("verl.parquet",), ("rows.jsonl",), ("verl.parquet", "rows.jsonl")])
def test_prompts_are_checked_counted_and_shown(run: Path, tmp_path: Path, files: tuple[str, ...]) -> None:
    told = words(tmp_path, *files)
    result = check.run(DataCheckRequest(run, told))
    assert [(each.kind, each.what) for each in result.findings if each.is_error] == []
    assert result.usable == result.rows == (4 if "verl.parquet" in files else 0) + (12 if "rows.jsonl" in files else 0)
    assert "empty answers" not in {each.kind for each in result.findings}
    shown = "\n".join(preview_lines(preview.run(DataPreviewRequest(run, told, rows="0")), Paint(colour=False)))
    assert QUESTION in shown
    assert stats.run(DataStatsRequest(run, told)).rows == result.rows


def test_the_samples_are_those_of_training(run: Path, tmp_path: Path) -> None:
    told = words(tmp_path, "verl.parquet", "rows.jsonl")
    looked_at = open_data(run, told).dataset
    trained: Any = build_mm_dataset(prompts_of(load_with_plugins(run, told).arguments.data).dataset_param)[0]
    for index in range(len(trained)):
        ids = trained[index]["input_ids"].tolist()
        assert looked_at[index]["input_ids"].tolist() == ids
        assert looked_at.outline(index).size.tokens == len(ids) == looked_at.measure(index).tokens
