"""Where a run keeps a best checkpoint, that is what is exported, asked, evaluated and named at the end of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_mm.checkpoint.choice import choose_checkpoint
from mindspeed_mm.core.errors import CheckpointError, UsageError
from tests.helpers.runs import mm, train
from tests.helpers.small_run_folder import make_text_run
from tests.helpers.tiny_run import make_rows, make_tiny_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1 and 2, of which the first is the best; the norm of step n is n higher (see `make_text_run`)."""
    folder = make_text_run(tmp_path)
    (folder / "best.json").write_text(json.dumps({"metric": "val_loss", "step": 1, "value": 3.1612, "history": []}))
    return folder


def norm_of(folder: Path) -> float:
    return float(load_file(folder / "model.safetensors")["model.norm.weight"].mean())


@pytest.mark.edge("BN13")
def test_the_best_checkpoint_is_exported(run: Path, tmp_path: Path) -> None:
    said = mm("export", run, tmp_path / "best")
    assert said.code == 0 and "iter_0000001 (best by val_loss 3.161)" in said.out
    for word, folder, why in (("newest", "newest", "newest"), ("2", "two", "named"), ("best", "again", "best by")):
        said = mm("export", run, tmp_path / folder, "--checkpoint", word)
        assert said.code == 0 and f"({why}" in said.out, said.err
    assert norm_of(tmp_path / "newest") == norm_of(tmp_path / "two") == pytest.approx(norm_of(tmp_path / "best") + 2)
    assert norm_of(tmp_path / "again") == norm_of(tmp_path / "best")


@pytest.mark.edge("BN13")
@pytest.mark.parametrize("verb", ["infer", "evaluate"])
def test_the_best_checkpoint_is_asked(verb: str, run: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps({"messages": [{"role": "user", "content": "red"}, {"role": "assistant", "content": "x"}]})
    )
    words = ["--data", rows, "--out", tmp_path / "out", "--max-new-tokens", "1"]
    for more, step in ((), 1), (("--checkpoint", "newest"), 2), (("--checkpoint", "2"), 2):
        said = mm(verb, run, *words, *more, *(["--overwrite"] if more and verb == "infer" else []))
        assert f"step {step} (" in said.err, said
        assert [path.name[:12] for path in (run / "exported").glob("iter_*")] == [f"iter_000000{step}"], said


@pytest.mark.edge("BN13")
def test_what_cannot_be_chosen_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no step 7.*Steps here: 1, 2"):
        choose_checkpoint(run, 7)
    with pytest.raises(UsageError, match="Use best, newest"):
        choose_checkpoint(run, "latest")
    with pytest.raises(UsageError, match="Leave it out"):
        choose_checkpoint(tmp_path, "newest")
    (run / "best.json").unlink()
    with pytest.raises(CheckpointError, match="keeps no best"):
        choose_checkpoint(run, "best")
    assert choose_checkpoint(run).why == "newest"


@pytest.mark.edge("BN13")
def test_a_best_checkpoint_that_is_gone_is_not_chosen(run: Path) -> None:
    (run / "best.json").write_text(json.dumps({"metric": "val_loss", "step": 9, "value": 3.0}))
    assert choose_checkpoint(run).why == "newest"


@pytest.mark.edge("BN13")
def test_a_validated_run_keeps_and_names_its_best_checkpoint(tmp_path: Path) -> None:
    """A rate so high that the loss grows: the first checkpoint is the best, and outlives two newer ones."""
    yaml = make_tiny_run(tmp_path)
    rows = make_rows(tmp_path / "val", 4, seed=9, images=(0,))
    words = (
        f"data.dataset_param.basic_parameters.val_dataset={rows}", "training.val_interval=2", "training.lr=1.0",
        "training.save_interval=2", "training.save_total_limit=2", "training.train_iters=8", "training.clip_grad=0",
    )  # fmt: skip
    out = train(yaml, tmp_path / "save", *words)
    records = [json.loads(line) for line in (tmp_path / "save" / "metrics.jsonl").read_text().splitlines()]
    losses = {each["step"]: each["val_loss"] for each in records if "val_loss" in each}
    best = min(losses, key=lambda step: losses[step])
    kept = sorted(int(path.name[5:]) for path in (tmp_path / "save").glob("iter_*"))
    assert kept == sorted({best, 6, 8})
    assert best not in (6, 8), losses
    assert f"use the best, step {best} (by val_loss {losses[best]:.4g})" in out
    assert choose_checkpoint(tmp_path / "save").folder.name == f"iter_{best:07d}"
    assert torch.isfinite(torch.tensor(list(losses.values()))).all()
