"""`model_name_or_path: runs/sft`: a run is trained on like a model, without an export in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.runs import mm, newest, tensors, train
from tests.helpers.tiny_run import make_tiny_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on one model: of whole weights, and of adapters."""
    root = tmp_path_factory.mktemp("runs")
    yaml = make_tiny_run(root)
    train(yaml, root / "sft", "training.train_iters=2", "training.lr=0.01")
    train(yaml, root / "lora", "training.train_iters=2", "training.lr=0.01", "training.lora.enable=true")
    return root


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    found = tensors(run, step)
    return {name: value for name, value in found.items() if name.startswith("model.")}


@pytest.mark.edge("BU4")
def test_a_run_is_trained_on(folder: Path, tmp_path: Path) -> None:
    """With a rate of 0 the new run saves what it started from: the run's weights."""
    words = (f"model.model_name_or_path={folder / 'sft'}", "training.train_iters=1", "training.lr=0")
    train(folder / "run.yaml", tmp_path / "next", *words)
    before, after = weights(folder / "sft", 2), weights(tmp_path / "next", 1)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    train(folder / "run.yaml", tmp_path / "first", words[0] + "/iter_0000002", *words[1:])
    assert all(torch.equal(before[name], value) for name, value in weights(tmp_path / "first", 1).items())


@pytest.mark.edge("BU4")
def test_adapters_are_merged(folder: Path, tmp_path: Path) -> None:
    """The exported merge, made beside it, is the reference."""
    words = (f"model.model_name_or_path={folder / 'lora'}", "training.train_iters=1", "training.lr=0")
    train(folder / "run.yaml", tmp_path / "next", *words)
    assert mm("export", folder / "lora", tmp_path / "merged", "--merge").code == 0
    train(folder / "run.yaml", tmp_path / "other", f"model.model_name_or_path={tmp_path / 'merged'}", *words[1:])
    one, other = weights(tmp_path / "next", 1), weights(tmp_path / "other", 1)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert not any("lora" in name for name in one)


@pytest.mark.edge("BU4")
def test_check_takes_it_too_and_a_run_of_a_run_is_exported(folder: Path, tmp_path: Path) -> None:
    words = (f"model.model_name_or_path={folder / 'sft'}", "training.train_iters=1")
    said = mm("check", folder / "run.yaml", *words)
    assert said.code == 0 and "step 2 (newest)" in said.out + said.err, said
    train(folder / "run.yaml", tmp_path / "next", *words)
    assert mm("export", tmp_path / "next", tmp_path / "exported").code == 0
    assert (tmp_path / "exported" / "tokenizer.json").is_file() and newest(tmp_path / "next") == 1


@pytest.mark.edge("BU4")
def test_a_run_that_has_not_saved_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.json").write_text("{}")
    said = mm("train", folder / "run.yaml", f"model.model_name_or_path={tmp_path / 'empty'}")
    assert said.code != 0 and "bug" not in said.err
