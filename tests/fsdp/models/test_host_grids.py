"""What patches get by the grid of their picture is the library's, and is worked out once for a grid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from mindspeed_mm import ensure_torchvision
from mindspeed_mm.fsdp.models.behaviour import host_grids
from mindspeed_mm.fsdp.models.behaviour.host_grids import KeptRows
from mindspeed_mm.tasks.verify.precision import keeping_double

ensure_torchvision()
BATCHES: tuple[list[list[int]], ...] = (
    [[1, 4, 4], [1, 2, 6], [1, 4, 4]],
    [[3, 4, 2], [1, 2, 6]],
    [[1, 2, 6], [1, 4, 4], [3, 4, 2]],
    [[1, 8, 4]],
    [[1, 8, 4]],
)
NEW = [2, 1, 0, 1, 0]
"""Grids of each batch that no batch before it has."""
WAYS: dict[str, dict[str, Any]] = {
    "get_vision_position_ids": {"spatial_merge_size": 2},
    "get_vision_interpolation_indices_and_weights": {"num_grid_per_side": 5, "align_corners": True},
}


class Recorded:
    """A function of the library, and the grids that it was asked for."""

    def __init__(self, name: str) -> None:
        from transformers import vision_utils

        self.function = getattr(vision_utils, name)
        self.__name__ = name
        self.asked: list[int] = []

    def __call__(self, grid_thw: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(len(grid_thw))
        return self.function(grid_thw, *args, **kwargs)


def tensors(made: Any) -> list[torch.Tensor]:
    return [made] if isinstance(made, torch.Tensor) else list(made)


def equal(one: Any, other: Any) -> bool:
    """Type included, by the bit."""
    pairs = zip(tensors(one), tensors(other), strict=True)
    return type(one) is type(other) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", WAYS)
def test_rows_are_those_of_the_library(name: str) -> None:
    function, settings = Recorded(name), WAYS[name]
    kept = KeptRows(function)
    for grids in BATCHES:
        found = kept.of(grids, torch.int64, (), settings)
        assert equal(found, function.function(torch.tensor(grids), **settings))
        for tensor in tensors(found):
            tensor.zero_()  # what is kept is not what was handed out
    assert function.asked == [number for number in NEW if number]
    with pytest.raises((RuntimeError, ValueError)):  # as the library does
        kept.of([], torch.int64, (), settings)


def test_other_settings_are_other_rows() -> None:
    function = Recorded("get_vision_position_ids")
    kept = KeptRows(function)
    for args, settings in (((2,), {}), ((1,), {}), ((2,), {"include_temporal": True})):
        found = kept.of(BATCHES[0], torch.int64, args, settings)
        assert equal(found, function.function(torch.tensor(BATCHES[0]), *args, **settings))


@pytest.mark.parametrize("first", ["single", "double"])
def test_runs_in_fp64_and_others_share_no_rows(first: str) -> None:
    function = Recorded("get_vision_interpolation_indices_and_weights")
    kept, settings = KeptRows(function), WAYS[function.__name__]
    for precision in (first, "single", "double", "single"):
        with keeping_double(of_whole_numbers=True) if precision == "double" else nullcontext():
            _, weights = kept.of(BATCHES[0], torch.int64, (), settings)
        assert weights.dtype is {"single": torch.float32, "double": torch.float64}[precision]
    assert len(function.asked) == {"single": 2, "double": 3}[first]  # rows of fp32 are worked out once


def test_what_is_kept_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_grids, "MOST_KEPT_PATCHES", 40)
    function = Recorded("get_vision_position_ids")
    kept = KeptRows(function)
    for grids in ([[1, 4, 4]], [[1, 4, 4]], [[1, 4, 6]], [[1, 2, 2]], [[1, 4, 4]], [[1, 8, 8]], [[1, 8, 8]]):
        found = kept.of(grids, torch.int64, (2,), {})
        assert equal(found, function.function(torch.tensor(grids), 2))
    # 16 and 24 patches are kept together; 4 more, and they are not; 64 never are.
    assert len(function.asked) == 6


@pytest.fixture
def wrapped() -> Iterator[tuple[Recorded, Any]]:
    function = Recorded("get_vision_position_ids")
    yield function, host_grids._on_host(function)


def test_rows_that_the_caller_has_are_taken(wrapped: tuple[Recorded, Any]) -> None:
    function, call = wrapped
    own, grid = torch.arange(8).view(4, 2), torch.tensor([[1, 2, 2]])
    arguments = {"position_ids": own, "other": 1}
    assert call(grid, 2, kwargs=arguments) is own
    assert arguments == {"other": 1}
    assert equal(call(grid, 2, kwargs=arguments), function.function(grid, 2))


def test_rows_without_numbers_are_not_kept() -> None:
    """A forecast computes large tensors without them, and a run in the same process needs some."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    real, simulated = Recorded("get_vision_position_ids"), FakeTensorMode()
    answers = iter([lambda rows: simulated.from_tensor(rows), lambda rows: rows])
    kept = KeptRows(lambda grid, *args: next(answers)(real(grid, *args)))
    for _ in range(3):
        found = kept.of([[1, 2, 2]], torch.int64, (2,), {})
    assert real.asked == [1, 1]
    assert equal(found, real.function(torch.tensor([[1, 2, 2]]), 2))
