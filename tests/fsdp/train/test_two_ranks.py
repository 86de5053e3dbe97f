"""Whole runs on two ranks: resumed under another number of ranks, stopped by one rank's trouble, validated together.

Both ranks start once for all cases; what they left is looked at here.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mindspeed_mm.fsdp.distributed.job.watchdog import Watchdog
from mindspeed_mm.fsdp.loss.objectives import TokenCrossEntropy
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.helpers.planned_steps import train_steps
from tests.helpers.runs import differing, kinds, lines, losses, mm, tensors, train, watched_steps
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_tiny_run

FP64 = ("parallel.fsdp_plan.param_dtype=fp64", "training.adam_fused=false")
VALIDATED = ("training.val_interval=3", "training.val_micro_batch_size=3")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without dropout: its numbers do not depend on who drew what."""
    folder = tmp_path_factory.mktemp("calm")
    make_tiny_qwen3_vl(folder / "model")
    (folder / "runs").mkdir()
    training = {"train_iters": 6, "micro_batch_size": 4, "gradient_accumulation_steps": 2, "save_interval": 100}
    path = make_tiny_run(folder, training=training)
    rows = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder / "val.jsonl").write_text("".join(rows[:11]))  # no multiple of 2 × 3
    return path


# --- what both ranks do, one case after another ----------------------------------------------------------------------


def cases(yaml: str) -> dict[str, Any]:
    """Every case on this rank. Returns codes, messages and sample ids by case; the runs lie in `runs/`."""
    runs = Path(yaml).parent / "runs"
    told: dict[str, Any] = {}

    def case(name: str, *words: object, save: str | None = None) -> None:
        with watched_steps() as seen:
            said = mm("train", yaml, f"training.save={runs / (save or name)}", *words)
        told[name] = {"code": said.code, "out": said.out, "err": said.err, "order": seen}
        dist.barrier()

    two = ("training.gradient_accumulation_steps=1",)  # the same global batch
    with recorded_phases() as told["phases"]:
        case("two", *two, *validation(yaml), "training.step_timeout_s=71", "training.save_timeout_s=72")
    case("one, then two", *two, "--steps", 3)
    case("one, then two in fp64", *two, *FP64, "--steps", 3)
    case("two, then one", *two, "--steps", 3)
    with broken_on_rank_one(steps=(3,)):
        case("nan", *two, "training.save_interval=1")
    with broken_on_rank_one(steps=(2, 3)):
        case("skipped", *two, "training.on_nonfinite=skip", "--steps", 4)
    lr = "0.001" if dist.get_rank() == 0 else "0.002"
    case("unlike", *two, f"training.lr={lr}")
    return told


def validation(yaml: str) -> tuple[str, ...]:
    return (*VALIDATED, f"data.dataset_param.basic_parameters.val_dataset={Path(yaml).parent / 'val.jsonl'}")


def broken_on_rank_one(steps: tuple[int, ...]) -> Any:
    real, calls = TokenCrossEntropy.terms, iter(range(1, 100))

    def terms(self: Any, model: Any, batch: Any) -> Any:
        factor = math.nan if next(calls) in steps and dist.get_rank() == 1 else 1.0
        return {name: loss * factor for name, loss in real(self, model, batch).items()}

    return mock.patch.object(TokenCrossEntropy, "terms", terms)


@contextmanager
def recorded_phases() -> Iterator[list[tuple[str, float]]]:
    seen: list[tuple[str, float]] = []
    real = Watchdog.phase

    def phase(self: Watchdog, name: str, limit_s: float) -> Any:
        seen.append((name, limit_s))
        return real(self, name, limit_s)

    with mock.patch.object(Watchdog, "phase", phase):
        yield seen


def alone(yaml: str, save: str, *words: object) -> list[list[str]]:
    with watched_steps() as seen:
        train(yaml, save, *words)
    return seen


@cache
def _both(yaml: Path) -> list[dict[str, Any]]:
    runs = yaml.parent / "runs"
    alone(str(yaml), str(runs / "one, then two"), "--steps", 3)
    alone(str(yaml), str(runs / "one, then two in fp64"), *FP64, "--steps", 3)
    return run_ranks(2, cases, str(yaml))


@pytest.fixture(scope="module")
def both(calm: Path) -> list[dict[str, Any]]:
    """What the ranks told, by rank."""
    return _both(calm)


@pytest.fixture(scope="module")
def one(calm: Path) -> Path:
    """The whole run on one rank."""
    save = calm.parent / "runs" / "one"
    (save.parent / "one.json").write_text(json.dumps(alone(str(calm), str(save), *validation(str(calm)))))
    return save


def order_of_two(told: list[dict[str, Any]], name: str) -> list[list[str]]:
    return [sorted(a + b) for a, b in zip(told[0][name]["order"], told[1][name]["order"], strict=True)]


def order_of_one(one: Path) -> list[list[str]]:
    return [sorted(step) for step in json.loads((one.parent / "one.json").read_text())]


# --- resuming under another number of ranks --------------------------------------------------------------------------


def close(left: dict[int, float], right: dict[int, float], tolerance: float) -> bool:
    return left.keys() == right.keys() and all(abs(left[s] - right[s]) <= tolerance * abs(right[s]) for s in left)


def test_one_then_two(both: list[dict[str, Any]], one: Path) -> None:
    save = one.parent / "one, then two"
    assert both[0]["one, then two"]["code"] == 0, both[0]["one, then two"]["err"]
    assert "world size was 1, is 2" in both[0]["one, then two"]["out"]
    assert order_of_two(both, "one, then two") == order_of_one(one)[3:]
    assert close(losses(save), losses(one), 1e-5)
    assert kinds(save) == ["save", "resume", "save"]


def test_one_then_two_in_fp64(both: list[dict[str, Any]], calm: Path) -> None:
    whole = calm.parent / "runs" / "fp64"
    alone(str(calm), str(whole), *FP64)
    assert close(losses(calm.parent / "runs" / "one, then two in fp64"), losses(whole), 1e-10)


def test_two_then_one(both: list[dict[str, Any]], calm: Path, one: Path) -> None:
    save = calm.parent / "runs" / "two, then one"
    seen = alone(str(calm), str(save))
    assert order_of_two(both, "two, then one") + [sorted(step) for step in seen] == order_of_one(one)
    assert close(losses(save), losses(one), 1e-5)


def test_another_number_of_ranks_is_another_computation(both: list[dict[str, Any]], one: Path) -> None:
    """The control: the tolerance above is not equality to the bit, and other data are far outside of it."""
    assert differing(tensors(one.parent / "two"), tensors(one)) != []
    shifted = dict(zip(losses(one), list(losses(one).values())[1:], strict=False))
    assert not close(shifted, {step: losses(one)[step] for step in shifted}, 1e-5)


# --- validation ------------------------------------------------------------------------------------------------------


def validation_losses(save: Path) -> list[float]:
    return [line["val_loss"] for line in lines(save / "metrics.jsonl") if "val_loss" in line]


def by_hand(yaml: Path, checkpoint: dict[str, torch.Tensor]) -> float:
    """Mean cross-entropy over every label token of the validation rows, by transformers, row by row."""
    from transformers import AutoModelForImageTextToText

    from mindspeed_mm.fsdp.data import build_mm_dataset
    from mindspeed_mm.fsdp.data.build import build_mm_dataloader
    from mindspeed_mm.fsdp.train.configuration import load_with_plugins

    words = [word.replace("val_dataset=", "dataset=") for word in validation(str(yaml)) if "val_dataset=" in word]
    arguments = load_with_plugins(yaml, words).arguments
    model = AutoModelForImageTextToText.from_pretrained(yaml.parent / "model").eval()
    names = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for name, tensor in names.items():
            if name in checkpoint:
                tensor.copy_(checkpoint[name])
    rows, _ = build_mm_dataset(arguments.data.dataset_param)
    loader = build_mm_dataloader(
        rows,
        arguments.data.dataloader_param,
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        dp_rank=0,
        dp_size=1,
        seed=0,
    )
    total, count = 0.0, 0
    for (batch,) in loader.one_pass():
        wanted = {
            k: v for k, v in batch.items() if k in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
        }
        wanted |= {k: batch[k] for k in ("mm_token_type_ids", "position_ids") if k in batch}
        with torch.no_grad():
            logits = model(**wanted).logits[0].double()
        labels = batch["labels"][0]
        for place in range(1, len(labels)):
            if labels[place] != -100:
                total -= float(logits[place - 1].log_softmax(-1)[labels[place]])
                count += 1
    return total / count


def test_validation_loss_is_the_mean_over_the_whole_set(both: list[dict[str, Any]], calm: Path, one: Path) -> None:
    assert both[0]["two"]["code"] == 0, both[0]["two"]["err"]
    expected = by_hand(calm, tensors(one))
    assert validation_losses(one)[-1] == pytest.approx(expected, rel=1e-5)
    assert len(validation_losses(one)) == 2
    assert validation_losses(one.parent / "two") == pytest.approx(validation_losses(one), rel=1e-5)


def test_validation_leaves_the_training_alone(both: list[dict[str, Any]], calm: Path, one: Path) -> None:
    without = calm.parent / "runs" / "without"
    assert [sorted(step) for step in alone(str(calm), str(without))] == order_of_one(one)
    assert differing(tensors(without), tensors(one)) == []


# --- one rank's trouble ----------------------------------------------------------------------------------------------


def test_nan_on_one_rank_stops_both_and_is_named(both: list[dict[str, Any]], calm: Path) -> None:
    assert [told["nan"]["code"] for told in both] == [5, 5]
    said = both[0]["nan"]["err"]
    assert f"rank 1: samples {', '.join(both[1]['nan']['order'][2])}" in said
    assert "rank 0: samples" not in said
    assert kinds(calm.parent / "runs" / "nan") == ["save", "save"]


def test_skips_on_one_rank_are_skips_of_all(both: list[dict[str, Any]], calm: Path) -> None:
    save = calm.parent / "runs" / "skipped"
    assert [told["skipped"]["code"] for told in both] == [0, 0]
    assert tensors(save)["optimizer.state.model.language_model.norm.weight.step"] == 2
    told = [event for event in lines(save / "events.jsonl") if event["kind"] == "warning"]
    assert [event["step"] for event in told] == [2, 3]
    assert all("rank 1: samples" in event["message"] for event in told)


def test_ranks_that_were_started_differently(both: list[dict[str, Any]]) -> None:
    for told in both:
        assert told["unlike"]["code"] == 3
        assert "training.lr is 0.001 on the one and 0.002 on the other" in told["unlike"]["err"]


def test_every_wait_for_another_rank_is_watched(both: list[dict[str, Any]]) -> None:
    for told in both:
        phases = dict(told["phases"])
        limits = {"step": 71.0, "validation": 71.0, "save": 72.0}
        assert all(limit == limits.get(name.split()[0], 600.0) for name, limit in phases.items()), phases
        assert [name for name in phases if name.startswith("step")] == [f"step {n}" for n in range(1, 7)]
        assert {"joining the job", "loading the checkpoint", "save", "validation", "leaving together"} <= phases.keys()


def hang_in_second_step(yaml: str, save: str) -> None:
    def sleep(engine: TrainEngine, _batches: Any) -> None:
        if dist.get_rank() == 1 and engine.iteration == 1:
            time.sleep(60)

    with mock.patch("mindspeed_mm.fsdp.train.run.job.Watchdog", partial(Watchdog, grace_s=2.5)), watched_steps(sleep):
        mm("train", yaml, f"training.save={save}", "training.step_timeout_s=1.5")


def test_a_rank_that_hangs_ends_the_job_and_is_named(calm: Path, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"exit code 3"):
        run_ranks(2, hang_in_second_step, str(calm), str(tmp_path), timeout_s=40)
    for rank in range(2):
        said = (tmp_path / "log" / f"hang_rank{rank}.txt").read_text()
        assert "rank 0: step 2 for more than 1.5 s" in said and "in summed_over" in said
        assert "rank 1: step 2 for more than 1.5 s" in said and "in sleep" in said


def test_no_fault_left_a_half_written_checkpoint(both: list[dict[str, Any]], calm: Path) -> None:
    assert not list((calm.parent / "runs").glob("*/.mindspeed-mm-*.*"))


def groups_left_by_runs(yaml: str) -> list[int]:
    """How many groups this rank is in after each of two runs inside the tests' own group."""
    counts = []
    for _ in range(2):
        train_steps(yaml, ["training.micro_batch_size=4", "training.gradient_accumulation_steps=1"])
        counts.append(len(distributed_c10d._world.pg_map))
    return counts


def test_a_second_run_inside_the_callers_group_makes_no_further_groups(tmp_path: Path) -> None:
    for counts in run_ranks(2, groups_left_by_runs, str(make_tiny_run(tmp_path))):
        assert counts[0] == counts[1]
