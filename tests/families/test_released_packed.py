"""Every family with its rows side by side in one: from a folder in its released keys a step on them is the step on each
row alone, in fp64; a model that cannot keep them apart is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data.data_utils import data_collator
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.families.test_released_training import BOUND, run_of, steps_of
from tests.helpers.packed_families import InDouble
from tests.helpers.parity import ParityError, StepRecord, compare_steps
from tests.helpers.planned_steps import train_steps
from tests.helpers.released_rows import ANSWERING
from tests.helpers.runs import watched_steps

DEFAULT = ("qwen3", "deepseek_vl2")
"""Of the default run; the others are slow ones."""
PACKED = [name for name in ANSWERING if name != "whisper"]
"""Whisper hears one sound and writes one text."""
ONE_STEP = ["training.train_iters=1", "training.lr_decay_style=constant"]
SINGLE = [*ONE_STEP, "training.micro_batch_size=1", "training.gradient_accumulation_steps=4"]
SIDE_BY_SIDE = [*ONE_STEP, "training.micro_batch_size=4"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture
def batches() -> Iterator[list[dict[str, Any]]]:
    """What the steps of a test were given."""
    seen: list[dict[str, Any]] = []

    def keep(engine: TrainEngine, given: list[Any]) -> None:
        seen.extend(given)

    with watched_steps(before=keep):
        yield seen


def side_by_side(yaml: str) -> list[StepRecord]:
    """A step on all rows, which share one."""
    with keeping_double(), InDouble():
        return train_steps(yaml, ["parallel.fsdp_plan.param_dtype=fp64", *SIDE_BY_SIDE], packs=True)


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in PACKED]
)
def test_packed_rows_are_trained_as_each_by_itself(name: str, root: Path, batches: list[dict[str, Any]]) -> None:
    yaml = str(run_of(root, name))
    alone = steps_of(yaml, SINGLE)
    assert [batch["input_ids"].shape[0] for batch in batches] == [1] * 4
    rows = sorted(row for batch in batches for row in batch["sample_ids"])
    batches.clear()
    packed = side_by_side(yaml)
    (batch,) = batches
    assert batch["input_ids"].shape[0] == 1 and sorted(batch["sample_ids"]) == rows
    compare_steps(alone, packed, BOUND)


def test_a_row_that_sees_its_neighbour_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: all rows of a pack are one document."""
    real = data_collator.packed_row

    def joined(*args: Any, **kwargs: Any) -> dict[str, Any]:
        batch = real(*args, **kwargs)
        borders = batch["cu_seq_lens_q"][[0, -1]]
        longest = int(borders[-1])
        return batch | {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders} | dict.fromkeys(
            ("max_length_q", "max_length_k"), longest
        )  # fmt: skip

    yaml = str(run_of(root, "qwen3"))
    alone = steps_of(yaml, SINGLE)
    monkeypatch.setattr(data_collator, "packed_row", joined)
    with pytest.raises(ParityError):
        compare_steps(alone, side_by_side(yaml), BOUND)


@pytest.mark.slow
def test_a_model_that_cannot_keep_them_apart_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="encoder-decoder"):
        side_by_side(str(run_of(root, "whisper")))
