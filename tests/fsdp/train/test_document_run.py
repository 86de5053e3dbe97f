"""Pre-training on documents longer than `cutoff_len`: as on pieces that are cut by hand, and as a run began."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.fsdp.data.data_utils.data_collator import build_collator
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import build_mm_plugin
from mindspeed_mm.fsdp.params.data_args import CollateParam, PreprocessParameters
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.hooks.step_record import StepRecorder
from mindspeed_mm.fsdp.train.trainer import GivenObjects
from tests.helpers.parity import compare_steps
from tests.helpers.planned_steps import Quiet
from tests.helpers.runs import lines, mm, train
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_run import make_tiny_run

BASIC = "data.dataset_param.basic_parameters"
MOST = 16
WORDS = (1, 40, 90, 7, 61, 33)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's YAML, which says nothing of long documents."""
    make_tiny_qwen3(tmp_path / "model")
    rows = [{"text": " ".join(f"{number} times {n}" for n in range(words))} for number, words in enumerate(WORDS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    basic = {"dataset": str(tmp_path / "rows.jsonl"), "stage": "pretrain", "cutoff_len": MOST}
    param = {"dataset_type": "huggingface", "basic_parameters": basic}
    data = {"dataset_param": param, "dataloader_param": {"num_workers": 0}}
    return make_tiny_run(tmp_path, data=data, training={"train_iters": 4, "save_interval": 2})


class ByHand:
    """The pieces of all documents, cut from what the plain tokenizer gives."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        plugin = build_mm_plugin(tokenizer, PreprocessParameters())
        self.collate_fn = build_collator(tokenizer, plugin, CollateParam())
        self._pieces: list[np.ndarray] = []
        for line in (folder / "rows.jsonl").read_text().splitlines():
            ids = [*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]
            assert len(ids) % MOST != 1
            self._pieces += [np.array(ids[start : start + MOST]) for start in range(0, len(ids), MOST)]

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self._pieces[index]
        return {"sample_id": str(index), "input_ids": ids, "labels": ids.copy(), "media": [], "shrunk": False}


def test_a_run_on_documents_is_the_run_on_their_pieces(run: Path) -> None:
    recorders = []
    for given in (None, GivenObjects(train_set=ByHand(run.parent))):
        recorders.append(StepRecorder())
        Quiet(load_with_plugins(run), hooks=[recorders[-1]], given=given).train()
    ours, by_hand = (recorder.steps for recorder in recorders)
    assert len(ours) == 4
    compare_steps(by_hand, ours, 0)


def test_a_run_is_resumed_within_a_document_and_keeps_the_policy_that_it_began_with(run: Path) -> None:
    folder = run.parent
    out = train(run, folder / "whole")
    assert re.search(r"data +5 of 6 documents have more tokens than cutoff_len 16 and are cut: \d+ samples", out)
    train(run, folder / "stopped", "--steps", 2)
    train(run, folder / "stopped")
    whole, stopped = (lines(folder / name / "metrics.jsonl") for name in ("whole", "stopped"))
    assert [line["loss"] for line in stopped] == [line["loss"] for line in whole]
    # As a version wrote it that left long documents out and knew no other default.
    short = [f"{BASIC}.cutoff_len=400", f"{BASIC}.truncation=drop"]
    train(run, folder / "old", *short, "--steps", 2)
    resolved = folder / "old" / "resolved.yaml"
    resolved.write_text(re.sub(r"(truncation: drop) .*", r"\1  # default", resolved.read_text()))
    out = train(run, folder / "old", short[0])
    assert f"{BASIC}.truncation drop" in next(line for line in out.splitlines() if line.startswith("kept"))
    other = mm("train", run, f"training.save={folder / 'old'}", "training.train_iters=6", short[0],
               f"{BASIC}.truncation=split")  # fmt: skip
    assert other.code == CheckpointError.exit_code and "truncation" in other.err and "was" in other.err


def test_check_preview_and_stats_count_pieces(run: Path) -> None:
    checked = json.loads(mm("data", "check", run, "--json").out)
    assert (checked["rows"], checked["usable"], checked["cut"]) == (6, 6, 5) and not checked["findings"]
    told = mm("data", "stats", run).out
    assert f"5 documents longer than cutoff_len, cut into pieces: {checked['samples']} samples in all" in told
    shown = json.loads(mm("data", "preview", run, "--row-id", "rows.jsonl:3", "--json").out)
    assert shown["rows"] == checked["samples"]
    assert shown["shown"][0]["place"].startswith("rows.jsonl:3, piece 1 of ")
    assert shown["shown"][0]["answers"][0]["tokens"] == MOST
    left_out = json.loads(mm("data", "check", run, "--json", f"{BASIC}.truncation=drop").out)
    finding = next(finding for finding in left_out["findings"] if finding["kind"] == "too long")
    assert left_out["usable"] == 1 and "are left out" in finding["what"]
    assert any(fix["what"].startswith(f"{BASIC}.truncation=split") for fix in finding["fixes"])
