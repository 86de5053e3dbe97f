"""What a data set says of its samples is not taken for granted of one that derives from it and makes others: that it
draws nothing, and how long they are."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import MM_PLUGINS
from mindspeed_mm.fsdp.data.data_utils.plugins.own_plugins import QwenVLPlugin
from mindspeed_mm.fsdp.data.data_utils.sample import SampleSize
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick
from mindspeed_mm.fsdp.data.dataloader.sizes import read_sample
from mindspeed_mm.fsdp.data.dataset import MMDataset, as_mm_dataset
from mindspeed_mm.fsdp.data.sample_cache import check_can_be_encoded_up_front
from mindspeed_mm.fsdp.data.sample_cache.identity import settings_of
from mindspeed_mm.fsdp.params.cards import dataset_cards
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.utils.register import data_register
from mindspeed_mm.tasks.data.opening import open_data
from tests.helpers.tiny_videoalign import write_reward_run


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
        check_can_be_encoded_up_front(DrawnRows())
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


@pytest.mark.parametrize("says", [{}, {"is_deterministic": True}])
def test_clips_that_a_media_plugin_may_draw_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: dict[str, Any]
) -> None:
    monkeypatch.setitem(MM_PLUGINS._entries, "Qwen2VLProcessor", type("Own", (QwenVLPlugin,), says))
    assert open_data(write_reward_run(tmp_path)).dataset.is_deterministic is bool(says)


class Measured(MMDataset):
    """Tells the sizes of its samples."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": [1, 2]}

    def measure(self, index: int) -> SampleSize:
        return SampleSize(len(self[index]["input_ids"]), 0)


class Renamed(Measured):
    """The same samples under other names."""

    def place(self, index: int) -> str:
        return f"row {index}"


class Longer(Renamed):
    """Other samples, of whose sizes it says nothing."""

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": [1, 2, 3]}


class LongerLater(Renamed):
    """Other samples in later epochs."""

    def item(self, index: int, epoch: int) -> Any:
        return {"input_ids": [1] * (2 + epoch)}


class Told(Longer):
    """Says that sizes are found as they were."""

    measure = Measured.measure


class Foreign:
    """Of no class of ours."""

    def __getitem__(self, index: int) -> Any:
        return index

    def measure(self, index: int) -> SampleSize:
        return SampleSize(1, 0)


class ForeignLonger(Foreign):
    """Other samples."""

    def __getitem__(self, index: int) -> Any:
        return -index


@pytest.mark.parametrize("kind", [Longer, LongerLater, ForeignLonger])
def test_sizes_of_other_samples_are_refused(kind: type) -> None:
    """Packs would be planned for samples that the run does not have."""
    with pytest.raises(ConfigError, match=f"{kind.__name__} makes .* sizes come from .*measure, made") as caught:
        as_mm_dataset(kind())
    assert f"Define measure in {kind.__name__}, too; where" in caught.value.problems[0].way_out


@pytest.mark.parametrize("kind", [Measured, Renamed, Told, Foreign, CountedRows, DrawnRows])
def test_sizes_of_the_samples_themselves_are_taken(kind: type) -> None:
    assert as_mm_dataset(kind()).origin.__class__ is kind


def test_built_in_data_sets_tell_the_sizes_of_their_samples() -> None:
    """And one that derives from them is told which of their members it has to bring."""
    for name in dataset_cards():
        kind = data_register.get(name)
        as_mm_dataset(kind.__new__(kind))
    shortened = type("Shortened", (data_register.get("huggingface"),), {"__getitem__": lambda self, index: None})
    with pytest.raises(ConfigError) as caught:
        as_mm_dataset(shortened.__new__(shortened))
    assert caught.value.problems[0].way_out == (
        "Define measure and outline in Shortened, too; where the sizes are still right, write measure = "
        "Qwen2VLDataset.measure and outline = Qwen2VLDataset.outline in it. A row that is only read otherwise "
        "overrides conversation(index) instead, of which all are made."
    )
