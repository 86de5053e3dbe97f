"""Weights that are written as a folder: what is not finite is told."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from mindspeed_mm.checkpoint.hf_folder import write_weights
from tests.helpers.generator_weights import lazy

WEIGHTS = {
    "fine": torch.ones(2),
    "nan": torch.tensor([1, torch.nan]),
    "large": torch.tensor([7e4]),
    "empty": torch.ones(0),
}


def as_held(key: str, dtype: torch.dtype) -> torch.dtype:
    return dtype


def in_halves(key: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float16


def test_tensors_that_are_not_finite_are_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"^NaN or infinity in nan\. Export an earlier checkpoint$"):
        write_weights(lazy(WEIGHTS), tmp_path, as_held, max_shard_bytes=8)


def test_numbers_that_are_too_large_for_the_written_type_are_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="in nan, large"):
        write_weights(lazy(WEIGHTS), tmp_path, in_halves)


def test_nothing_is_said_of_finite_ones(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_weights(lazy({"fine": WEIGHTS["fine"], "empty": WEIGHTS["empty"]}), tmp_path, as_held)
