"""Whole runs whose micro-batches are made by size: packed, mixed, streamed, validated; stopped and resumed by other
ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from mindspeed_mm.tasks.report.data import read_run
from mindspeed_mm.tasks.report.report import summary
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import differing, kinds, lines, losses, mm, tensors, train, watched_steps
from tests.helpers.tiny_run import make_rows, make_tiny_run

BASIC = "data.dataset_param.basic_parameters"
LOADER = "data.dataloader_param"
PACKED = (f"{BASIC}.packing=true", f"{BASIC}.cutoff_len=96")
MIXED = (*PACKED, f"{BASIC}.mix.weights={{rows.jsonl: 2, more: 1}}")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orders")
    (folder / "more").mkdir()
    make_rows(folder / "more", 10, seed=3)
    training = {"train_iters": 6, "micro_batch_size": 1, "gradient_accumulation_steps": 4, "save_interval": 100}
    path = make_tiny_run(folder, training=training)
    for name in (folder / "more" / "images").iterdir():
        (folder / "images" / f"more_{name.name}").write_bytes(name.read_bytes())
    rows = (folder / "more" / "rows.jsonl").read_text().replace("images/", "images/more_")
    (folder / "more" / "rows.jsonl").write_text(rows)
    return path


def both(yaml: Path) -> str:
    return f"{BASIC}.dataset=[{yaml.parent / 'rows.jsonl'}, {{path: {yaml.parent / 'more'}, name: more}}]"


def run(yaml: Path, save: Path, *words: object) -> list[list[str]]:
    with watched_steps() as seen:
        train(yaml, save, *words)
    return seen


def test_a_packed_mix_stops_and_goes_on(calm: Path, tmp_path: Path) -> None:
    whole = run(calm, tmp_path / "whole", *MIXED, both(calm))
    first = run(calm, tmp_path / "parts", *MIXED, both(calm), "--steps", 3)
    then = run(calm, tmp_path / "parts", *MIXED, both(calm), f"{LOADER}.num_workers=1", f"{LOADER}.enable_preload=true")
    assert first + then == whole
    assert any(len(step) > 8 for step in whole)
    assert differing(tensors(tmp_path / "parts"), tensors(tmp_path / "whole")) == []
    metrics = [line for line in lines(tmp_path / "whole" / "metrics.jsonl") if "useful" in line]
    assert all(0.8 < line["useful"] <= 1 and 1 <= line["imbalance"] < 2 for line in metrics) and len(metrics) == 6
    mixed = [event for event in lines(tmp_path / "whole" / "events.jsonl") if event["kind"] == "mix"]
    assert mixed[-1]["shares"]["more"] == pytest.approx(1 / 3, abs=0.2)
    assert "save" in kinds(tmp_path / "whole")


def test_another_budget_is_another_run(calm: Path, tmp_path: Path) -> None:
    run(calm, tmp_path, *PACKED, "--steps", 2)
    said = mm("train", calm, f"training.save={tmp_path}", *PACKED, f"{LOADER}.max_tokens_per_batch=80")
    assert said.code != 0
    then = "kind packed, micro_batches_per_step 4, tokens"
    assert f'micro-batches  was "{then} 96", is "{then} 80"' in said.err


def test_streamed_rows_need_a_number_of_steps(calm: Path, tmp_path: Path) -> None:
    whole = run(calm, tmp_path / "whole", f"{BASIC}.streaming=true", f"{LOADER}.shuffle_window=7")
    words = (f"{BASIC}.streaming=true", f"{LOADER}.shuffle_window=7")
    parts = run(calm, tmp_path / "parts", *words, "--steps", 2) + run(calm, tmp_path / "parts", *words)
    assert parts == whole
    said = mm("train", calm, *words, "training.train_epochs=2")
    assert said.code != 0 and "training.train_epochs  the number of streamed rows is not known" in said.err


def test_validation_is_the_mean_over_the_whole_set_however_it_is_packed(calm: Path, tmp_path: Path) -> None:
    words = (f"{BASIC}.val_dataset={calm.parent / 'more'}", "training.val_interval=6")
    found = []
    for name, more in (("packed", PACKED), ("plain", ()), ("budget", (f"{LOADER}.max_tokens_per_batch=120",))):
        save = tmp_path / name
        run(calm, save, *words, *more, "training.lr=1e-30", "training.train_iters=1", f"{BASIC}.cutoff_len=96")
        found.append([line["val_loss"] for line in lines(save / "metrics.jsonl") if "val_loss" in line][-1])
    assert found == pytest.approx([found[1]] * 3, rel=1e-5)


def on_two_ranks(yaml: str, runs: str) -> None:
    with watched_steps() as seen:
        train(yaml, f"{runs}/two", *PACKED, "training.gradient_accumulation_steps=2", "training.train_iters=4")
    (Path(runs) / f"{dist.get_rank()}.json").write_text(json.dumps(seen))


@pytest.mark.slow
def test_two_ranks_do_what_one_does_and_measure_for_each_other(calm: Path, tmp_path: Path) -> None:
    run_ranks(2, on_two_ranks, str(calm), str(tmp_path))
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    alone = run(calm, tmp_path / "one", *PACKED, "training.train_iters=4")
    together = [sorted(one + two) for one, two in zip(*ranks, strict=True)]
    assert together == [sorted(step) for step in alone]
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert list(two.values()) == pytest.approx(list(one.values()), rel=1e-5)


def validated(yaml: Path, save: Path, *words: object) -> dict[str, float]:
    """What the last validation of a run of one step told."""
    run(yaml, save, "training.lr=1e-30", "training.train_iters=1", "training.val_interval=1", *words)
    (found,) = [line for line in lines(save / "metrics.jsonl") if "val_loss" in line]
    return {name: value for name, value in found.items() if name.startswith("val_")}


@pytest.mark.edge("R2")
def test_validation_data_are_read_whole_beside_a_mixture_or_a_stream(calm: Path, tmp_path: Path) -> None:
    own = f"{BASIC}.val_dataset={calm.parent / 'more'}"
    expected = validated(calm, tmp_path / "plain", own)["val_loss"]
    mix = f"{BASIC}.mix.weights={{rows.jsonl: 2, more: 1}}"
    ways = {
        "mixed": (own, both(calm), mix),
        "mixed and packed": (own, both(calm), *MIXED),
        "streamed": (own, f"{BASIC}.streaming=true"),
        "streamed and packed": (own, f"{BASIC}.streaming=true", *PACKED),
    }
    for name, words in ways.items():
        assert validated(calm, tmp_path / name, *words)["val_loss"] == pytest.approx(expected, rel=1e-5), name


@pytest.mark.edge("R2")
def test_a_share_set_aside_holds_rows_that_a_mixture_leaves_out(calm: Path, tmp_path: Path) -> None:
    words = (both(calm), f"{BASIC}.val_rate=0.3")
    expected = validated(calm, tmp_path / "plain", *words)
    weights = f"{BASIC}.mix.weights={{rows.jsonl: 0, more: 1}}"
    assert validated(calm, tmp_path / "mixed", *words, weights) == pytest.approx(expected, rel=1e-5)


@pytest.mark.edge("N3", "N4", "N6")
def test_val_loss_is_the_cross_entropy_and_other_terms_have_their_names(calm: Path, tmp_path: Path) -> None:
    own = (f"{BASIC}.val_dataset={calm.parent / 'more'}", "training.val_micro_batch_size=4")
    expected = validated(calm, tmp_path / "plain", *own)
    assert list(expected) == ["val_loss"]
    loss = "features.loss_cfg"
    with_z = validated(calm, tmp_path / "z", *own, f"{loss}.z_loss_coef=0.01")
    assert with_z["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-6) and with_z["val_z_loss"] > 0
    event = [event for event in lines(tmp_path / "z" / "events.jsonl") if event["kind"] == "validate"][-1]
    assert (event["loss"], event["z_loss"]) == (with_z["val_loss"], with_z["val_z_loss"])
    raw = validated(calm, tmp_path / "raw", *own, f"{loss}.loss_type=raw")
    assert raw == pytest.approx(expected, rel=1e-5)
    shown = dict(summary(read_run(tmp_path / "z")))["validation loss"]
    assert shown == f"{with_z['val_loss']:.4f}, val_z_loss {with_z['val_z_loss']:.4f}"
