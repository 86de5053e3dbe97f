"""A plugin's function gets what its signature asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.utils.plugins import call_plugin

pytestmark = pytest.mark.edge("R12")

OFFERED = {"basic_param": 1, "preprocess_param": 2, "dataset_param": 3, "basic_parameters": 1}


class ByThree:
    def __init__(self, basic_param: int, preprocess_param: int, dataset_param: int) -> None:
        self.got = (basic_param, preprocess_param, dataset_param)


def call(function: Callable[..., Any]) -> Any:
    order = ("basic_param", "preprocess_param", "dataset_param")
    return call_plugin(function, OFFERED, order=order, spread=order, key="the.key", name="mine")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a, b, c: (a, b, c), (1, 2, 3)),
        (lambda a, /, b: (a, b), (1, 2)),
        (lambda dataset_param: dataset_param, 3),
        (lambda preprocess_param, basic_parameters: (preprocess_param, basic_parameters), (2, 1)),
        (lambda a, size=7, *, dataset_param: (a, size, dataset_param), (1, 7, 3)),
        (lambda *given: given, (1, 2, 3)),
        (lambda a, *given: (a, *given), (1, 2, 3)),
        (lambda basic_param, **given: given, {"preprocess_param": 2, "dataset_param": 3}),
        (lambda: "nothing", "nothing"),
        (lambda *a, **k: (a, k), ((1, 2, 3), {})),
        (lambda basic_param, *_, **__: ByThree(basic_param, 5, 6).got, (1, 5, 6)),
    ],
)
def test_by_name_else_by_place(function: Callable[..., Any], expected: Any) -> None:
    assert call(function) == expected


def test_a_class_gets_it_by_its_constructor() -> None:
    assert call(ByThree).got == (1, 2, 3)


def test_what_nobody_gives_is_named() -> None:
    with pytest.raises(ConfigError, match="'mine' has a parameter 'split', which is not passed") as caught:
        call(lambda basic_param, *, split: split)
    assert caught.value.problems[0].key == "the.key"


def test_an_error_of_the_plugin_is_told_with_its_line_and_ours_as_they_are() -> None:
    def fails(basic_param: int) -> None:
        raise KeyError("pixels")

    def refuses(basic_param: int) -> None:
        raise DataError("no rows")

    with pytest.raises(ConfigError, match=r"'mine' cannot be built: KeyError: 'pixels'") as caught:
        call(fails)
    assert "test_plugin_call.py:" in caught.value.problems[0].where
    with pytest.raises(DataError, match="no rows"):
        call(refuses)
