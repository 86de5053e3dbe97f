"""The order of the samples of an epoch: a pure function of (seed, epoch)."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.suggest import did_you_mean

SAMPLER_KEY = "data.dataloader_param.sampler_type"
_WORD = 2**64


class Sampler(Protocol):
    """The order of an epoch."""

    size: int

    def order(self, epoch: int) -> np.ndarray:
        """(size,) data set indices, every one once."""


class SequentialSampler:
    """The rows as they stand."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size

    def order(self, epoch: int) -> np.ndarray:
        """0, 1, 2 …"""
        return np.arange(self.size)


class BaseRandomBatchSampler:
    """A new random order every epoch."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self._seed = size, seed

    def order(self, epoch: int) -> np.ndarray:
        """The permutation of (seed, epoch)."""
        return permutation(self.size, self._seed, epoch)


def permutation(size: int, seed: int, stream: int) -> np.ndarray:
    """A permutation that no library version changes: the ranks of raw Philox words (Salmon et al., 2011)."""
    return _permutation(size, seed % _WORD, stream % _WORD)


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int, stream: int) -> np.ndarray:
    words = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).random_raw(size)
    order = np.argsort(words, kind="stable")
    order.setflags(write=False)
    return order


SAMPLERS = {"BaseRandomBatchSampler": BaseRandomBatchSampler, "SequentialSampler": SequentialSampler}
BUCKET_SAMPLERS = frozenset({"BucketBatchSampler", "VariableVideoBatchSampler", "LengthGroupedSampler"})
"""Names of one order, that of `buckets.py`, for data sets that know the sizes of their samples."""
_PLANNED = BUCKET_SAMPLERS | {"TokenBudgetSampler"}


def build_sampler(dataloader_param: Any, size: int, seed: int) -> Sampler:
    """The sampler that the configuration names; `shuffle: false` and mode `base` keep the rows in order.

    Raises:
        ConfigError: Unknown, or not built yet.
    """
    name, mode = dataloader_param.sampler_type, dataloader_param.dataloader_mode
    if mode not in ("sampler", "base"):
        raise ConfigError(f"'{mode}' is not built yet for this data set", key="data.dataloader_param.dataloader_mode")
    check_sampler_name(name, SAMPLERS)
    return SequentialSampler(size) if keeps_order(dataloader_param) else SAMPLERS[name](size, seed)


def check_sampler_name(name: str, known: Collection[str]) -> None:
    """Raise `ConfigError` for a name that is not known."""
    if name in known:
        return
    built = f"Built: {', '.join(sorted(known))}."
    if name in _PLANNED:
        raise ConfigError(f"{name} is not built yet for this data set", key=SAMPLER_KEY, way_out=built)
    raise ConfigError(f"'{name}' is no sampler", key=SAMPLER_KEY, way_out=f"{did_you_mean(name, known)}{built}")


def keeps_order(dataloader_param: Any) -> bool:
    """Whether rows are taken as they stand."""
    return dataloader_param.dataloader_mode == "base" or not dataloader_param.shuffle
