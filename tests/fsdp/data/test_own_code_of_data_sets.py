"""A data set that derives from another one is not taken to draw nothing because that one says so of itself."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick
from mindspeed_mm.fsdp.data.dataloader.sizes import read_sample
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.data.sample_cache import encoded_up_front
from mindspeed_mm.fsdp.data.sample_cache.identity import settings_of
from mindspeed_mm.fsdp.params.cards import dataset_cards
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.utils.register import data_register


class CountedRows(MMDataset):
    """Says that it draws nothing."""

    is_deterministic = True
    has_rows = True

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return self.conversation(index)

    def conversation(self, index: int) -> Any:
        return index


class OtherStart(CountedRows):
    """Brings no code that makes samples."""

    truncation = "skip"

    def __init__(self) -> None:
        self.first = 0


class DrawnRows(CountedRows):
    """Draws, and says nothing of it."""

    def conversation(self, index: int) -> Any:
        return random.random()


class DrawnRowsFurther(DrawnRows):
    """Has no code of its own."""


class SaysSo(DrawnRows):
    """Says that it draws nothing after all."""

    is_deterministic = True

    def conversation(self, index: int) -> Any:
        return -index


class DrawsBeside:
    """Mixed in."""

    def conversation(self, index: int) -> Any:
        return random.random()


class MixedRows(DrawsBeside, CountedRows):
    """Draws by a base beside the one that says that it does not."""


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (CountedRows, True), (OtherStart, True), (DrawnRows, False), (DrawnRowsFurther, False), (SaysSo, True),
        (MixedRows, False),
    ],
)  # fmt: skip
def test_a_statement_is_of_the_code_that_it_was_made_of(kind: type[MMDataset], says: bool) -> None:
    assert kind().is_deterministic is says


def test_what_a_derived_data_set_draws_depends_on_the_sample_alone() -> None:
    before = random.getstate()
    try:
        random.seed(1)
        first = [read_sample(DrawnRows(), Pick(epoch, row), 7) for epoch, row in ((0, 0), (0, 1), (1, 0))]
        random.seed(2)
        assert read_sample(DrawnRows(), Pick(1, 0), 7) == first[2]
        assert len(set(first)) == 3
    finally:
        random.setstate(before)


def test_what_may_draw_is_not_encoded_once_for_all_epochs() -> None:
    with pytest.raises(ConfigError, match="DrawnRows may draw random numbers") as caught:
        encoded_up_front(DrawnRows(), DatasetParam())
    assert "is_deterministic = True" in caught.value.problems[0].way_out


def test_our_own_data_sets_say_it_of_themselves() -> None:
    """All but those that draw what is left out of a row."""
    silent = {name for name in dataset_cards() if not data_register.get(name).is_deterministic}
    assert silent == {"bagel", "internvlu"}


def test_code_of_a_data_set_from_outside_makes_old_samples_void(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, path = ModuleType("outside_rows"), tmp_path / "outside_rows.py"
    outside.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "outside_rows", outside)
    kind = type("RowsFromOutside", (CountedRows,), {"__module__": "outside_rows"})
    found = []
    for text in ("a = 1", "a = 1", "a = 2"):
        path.write_text(text)
        found.append(settings_of(DatasetParam(), None, kind())["code"])
    assert found[0] == found[1] != found[2]
