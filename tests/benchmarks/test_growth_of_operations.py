"""What the benchmarks of towers, windows and copies of experts count: they would see the fault that they look for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import balance, towers, windows
from mindspeed_mm.fsdp.models.behaviour import host_grids
from mindspeed_mm.fsdp.ops import attention

PICTURES = (1, 5)


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(towers, "PICTURES", PICTURES)


def test_a_tower_that_is_called_picture_by_picture_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = towers.of_kind("qwen2_5_vl", "image")
    assert [case["attention"] for case in at_once.values()] == [1, 1]
    assert at_once["1"] == at_once["5"]
    with monkeypatch.context() as patch:
        patch.setattr(host_grids, "_TAKE_BORDERS", ())
        one_by_one = towers.of_kind("qwen2_5_vl", "image")
    assert one_by_one["1"]["attention"] == 1 and one_by_one["5"]["attention"] >= 5


@pytest.mark.parametrize(("name", "most"), [("gemma4", 63), ("omni", 70), ("mistral3", 61)])
def test_blocks_that_had_most_operations_keep_to_their_number(name: str, most: int) -> None:
    counts = towers.of_kind(name, "image")
    assert [case["attention"] for case in counts.values()] == [1, 1]
    assert counts["1"] == counts["5"]
    assert 50 < counts["1"]["outside"] <= most < towers.MOST_OUTSIDE


def test_a_tower_whose_queries_meet_another_number_of_keys_is_counted() -> None:
    """As the projector of Granite Vision has them, beside its blocks."""
    assert towers.of_kind("granite4_vision", "image")["1"] == {"attention": 1, "outside": 36}


def test_wrong_gradients_of_a_tower_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert towers.worst_difference("mistral3") < towers.TOLERANCE
    real = attention._Layer.attend_documents
    monkeypatch.setattr(attention._Layer, "attend_documents", lambda *args: real(*args) * (1 + 1e-6))
    assert towers.worst_difference("mistral3") > towers.TOLERANCE


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("pictures", [1, 64, 256])
def test_pictures_have_the_same_patches_together(pictures: int, equal: bool) -> None:
    grids = towers.grids_of(pictures, equal=equal)
    assert len(grids) == pictures and sum(t * h * w for t, h, w in grids) == towers.PATCHES
    assert equal or pictures == 1 or len({h * w for _, h, w in grids}) > 1


@pytest.mark.parametrize("kind", windows.KINDS)
def test_a_window_that_is_one_token_off_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW", 16)
    assert windows.difference(kind, 256) < windows.DIFFERENCE
    real = windows.inputs

    def off(*args: Any) -> Any:
        *tensors, options = real(*args)
        return *tensors, options | {"sliding_window": 17}

    monkeypatch.setattr(windows, "inputs", off)
    assert windows.difference(kind, 256) > windows.DIFFERENCE


def test_one_call_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW", 16)
    windows.main("window, sinks, packed", 256)
    assert json.loads(capsys.readouterr().out).keys() == {"cpu_s", "added_mb"}


def test_copies_even_out_and_no_row_is_lost() -> None:
    layer = balance.of_layer(4, 16)
    assert layer["differing"] == 0
    assert layer["with_any"]["max"] <= layer["with_copies"]["max"] < layer["at_home"]["max"]
    tower = balance.of_towers(4)
    assert 1 <= tower["over_best"] < balance.MOST_OVER_BEST < tower["at_home"] / tower["shared"]
