"""The report of a run shows what its model was given: read again by the run's own configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mindspeed_mm.fsdp.params.loader import dump_resolved, load_config
from mindspeed_mm.tasks.data import preview
from mindspeed_mm.tasks.report import report
from mindspeed_mm.tasks.report.report import MOST_ROWS, training_rows
from mindspeed_mm.tasks.requests.data import DataPreviewRequest
from tests.tasks.data_rows import make_run
from tests.tasks.test_report import Page, external


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder as `mm train` leaves it, as far as this goes."""
    yaml = make_run(tmp_path)
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"status": "finished"}))
    (folder / "resolved.yaml").write_text(dump_resolved(load_config(yaml)))
    return folder


def test_the_first_rows_of_training_are_on_the_page(run: Path, tmp_path: Path) -> None:
    html = report.run([run]).read_text()
    page = Page(html)
    assert external(page, html) == []
    assert "Training samples" in page
    expected = preview.run(DataPreviewRequest(tmp_path / "run.yaml", count=MOST_ROWS)).shown
    for row in expected:
        assert row.place in page
        told = [s.text for s in row.answers[0].stretches if s.weight]
        trained = [re.sub(r"<.*?>", "", part) for part in re.findall(r'class="trained">(.*?)</span></span>', html)]
        assert told[0].replace("<", "&lt;").replace(">", "&gt;") in trained
    assert page.tags.count("img") == sum(len(row.media) for row in expected) > 0


def test_rows_that_are_gone_are_told(run: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").unlink()
    page = Page(report.run([run]).read_text())
    assert "They cannot be read any more" in page


@pytest.mark.parametrize(
    "edit", ["training:\n  plugin: [some_code]\n", "data:\n  dataset_param:\n    dataset_type: generation\n", "lr: 1\n"]
)
def test_no_foreign_code_is_run_and_nothing_is_shown_where_there_are_no_rows(run: Path, edit: str) -> None:
    (run / "resolved.yaml").write_text(edit)
    assert training_rows(run) is None
    (run / "resolved.yaml").unlink()
    assert training_rows(run) is None


@pytest.mark.edge("S3")
@pytest.mark.parametrize("packing", ["false", "true"])
def test_a_folders_code_is_not_run_though_the_run_trusted_it(run: Path, tmp_path: Path, packing: str) -> None:
    (model,) = (path.parent for path in tmp_path.rglob("tokenizer_config.json"))
    ran = tmp_path / "code-was-run"
    for name in ("processing_own", "configuration_own", "tokenization_own"):
        (model / f"{name}.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n")
    own = {
        "AutoProcessor": "processing_own.Own",
        "AutoConfig": "configuration_own.Own",
        "AutoTokenizer": ["tokenization_own.Own", "tokenization_own.Own"],
    }
    for name in ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        path = model / name
        content = json.loads(path.read_text()) if path.exists() else {}
        kinds = {"model_type": "own"} | dict.fromkeys(("processor_class", "tokenizer_class"), "Own")
        path.write_text(json.dumps({**content, **kinds, "auto_map": own}))
    words = ["model.trust_remote_code=true", "data.dataset_param.preprocess_parameters.trust_remote_code=true"]
    words.append(f"data.dataset_param.basic_parameters.packing={packing}")
    (run / "resolved.yaml").write_text(dump_resolved(load_config(tmp_path / "run.yaml", words)))
    assert "They cannot be read any more" in Page(report.run([run]).read_text())
    assert not ran.exists()
