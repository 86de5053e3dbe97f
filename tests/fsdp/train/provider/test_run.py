"""A whole run with functions of a user on one process: data of every kind, validation, a test set, reports, resuming,
and the arguments that functions read."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.train.hooks.step_record import StepRecorder
from mindspeed_mm.fsdp.train.provider.callbacks import Callbacks
from mindspeed_mm.fsdp.train.provider.live import LIVE, live_args
from mindspeed_mm.fsdp.train.provider.trainer import ProviderOptions, ProviderTrainer
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from tests.fsdp.train.provider.user_run import configuration, forward_step, rows, seeded_model
from tests.helpers.tiny_run import STEADY


class Rows(Dataset[Any]):
    """A data set without a loader."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return tuple(part[index] for part in rows(12))


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*rows(12)), batch_size=2)


def iterator(steps: int) -> Iterator[Any]:
    for _ in range(steps):
        yield from loader()


def run(
    provider: Any,
    folder: Path | None = None,
    *,
    args: Namespace | None = None,
    form: str = "loss and dict",
    eval_interval: int = 0,
    **more: Any,
) -> tuple[TrainEngine | None, list[Any]]:
    recorder = StepRecorder()
    training = {"save": str(folder) if folder else None, "train_iters": 5, **STEADY, **more}
    callbacks = Callbacks(seeded_model, provider, partial(forward_step, form))
    config = configuration(training=training)
    trainer = ProviderTrainer(
        config, callbacks, ProviderOptions(eval_iters=2, eval_interval=eval_interval), args=args, hooks=[recorder]
    )
    return trainer.train(), recorder.steps


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("provider", [Rows, partial(iterator, 2), lambda: (loader(), None)])
def test_every_kind_of_data_gives_the_same_steps(provider: Any) -> None:
    """Twelve rows are three steps: the fourth begins again."""
    _, expected = run(loader)
    _, steps = run(provider)
    assert len(steps) == 5
    assert [float(step["loss"]) for step in steps] == [float(step["loss"]) for step in expected]
    assert len({float(step["loss"]) for step in steps}) == 5  # they differ, weights change too


def test_validation_test_set_reports_and_arguments(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    args = Namespace()

    def provider(numbers: list[int]) -> Any:
        assert live_args() is args
        assert numbers == [5 * 4, 3 * 2 * 4, 2 * 4]
        seen.append((args.iteration, args.consumed_train_samples))
        return loader(), loader(), loader()

    engine, steps = run(provider, tmp_path / "run", args=args, form="loss and dict", eval_interval=2)
    assert seen == [(0, 0)]
    assert (args.iteration, args.consumed_train_samples) == (5, 20)
    written = metrics(tmp_path / "run")
    assert [line["step"] for line in written if "val_loss" in line] == [2, 4, 5]
    assert [line["step"] for line in written if "test_loss" in line] == [5]
    reported = [line for line in written if "reported/mean" in line]
    assert [line["reported/mean"] for line in reported] == pytest.approx([float(s["loss"]) for s in steps])

    # A pair is a sum and its divisor: the mean over all tokens, not that of the means of micro-batches.
    x, y, mask = (part[:4] for part in rows(12))
    with torch.no_grad():
        squares = (seeded_model()(x) - y) ** 2 * mask
    assert reported[0]["reported/squares"] == pytest.approx(float(squares.sum() / mask.sum()))
    assert reported[0]["reported/squares"] != pytest.approx(reported[0]["reported/mean"])

    assert engine is not None
    with torch.no_grad():
        x, y, mask = (part[:8] for part in rows(12))  # two steps of two micro-batches of two rows
        squares = ((engine.model(x) - y) ** 2 * mask).sum(1).reshape(4, 2).sum(1)
        expected = (squares / mask.sum(1).reshape(4, 2).sum(1)).mean()
    assert [line["test_loss"] for line in written if "test_loss" in line] == pytest.approx([float(expected)])


def test_a_resumed_run_goes_on_in_the_data(tmp_path: Path) -> None:
    _, whole = run(loader)
    run(loader, tmp_path / "run", train_iters=5, save_interval=2)
    for step in (4, 5):
        _remove(tmp_path / "run" / f"iter_{step:07d}")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2")
    _, rest = run(loader, tmp_path / "run", train_iters=5, save_interval=2)
    assert [float(step["loss"]) for step in rest] == [float(step["loss"]) for step in whole[2:]]


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def test_data_that_end() -> None:
    with pytest.raises(DataError, match="the data ended after 3 of 5 steps"):
        run(partial(iterator, 1))
    with pytest.raises(ConfigError, match="returned int"):
        run(lambda: 3)


def test_values_of_a_model_that_is_built_on_meta() -> None:
    """From scratch, by the modules' own initialisation; gradients flow."""
    callbacks = Callbacks(seeded_model, loader, partial(forward_step, "loss"))
    recorder = StepRecorder()
    training = {"init_model_with_meta_device": True}
    ProviderTrainer(configuration(training=training), callbacks, hooks=[recorder]).train()
    assert all(bool(g.isfinite().all()) and bool(g.abs().sum() > 0) for g in recorder.steps[0]["gradients"].values())


def test_sequences_are_whole() -> None:
    config = configuration(parallel={"ulysses_parallel_size": 2})
    with pytest.raises(ConfigError, match="2, but own callbacks see whole sequences"):
        ProviderTrainer(config, Callbacks(seeded_model, loader, partial(forward_step, "loss"))).train()


def test_arguments_outside_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIVE, "args", None)
    with pytest.raises(ConfigError, match="there are no arguments yet"):
        live_args()
