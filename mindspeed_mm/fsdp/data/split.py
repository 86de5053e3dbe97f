"""A part of a data set, set aside for validation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import Part
from mindspeed_mm.fsdp.data.dataloader.sampler import permutation

_SPLIT_STREAM = 2**64 - 1
"""Beside the streams of the epochs."""


_BY_INDEX = frozenset({"sample", "measure", "outline", "row", "raw", "describe"})
"""What a data set may tell of a sample by its number."""
_OF_THE_WHOLE = frozenset({"known_sizes"})


class DatasetPart(Dataset[Any]):
    """Some of the samples of a data set; everything else about it stays.

    Args:
        whole: The data set.
        indices: Which samples, ascending.
        name: For the fingerprint.
    """

    def __init__(self, whole: Any, indices: np.ndarray, name: str) -> None:
        self._whole, self._indices, self._name = whole, indices, name

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._whole[int(self._indices[index])]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in _OF_THE_WHOLE:
            raise AttributeError(name)
        found = getattr(self._whole, name)
        return _Renumbered(found, self._indices) if name in _BY_INDEX else found

    def place(self, index: int) -> str:
        """Where sample `index` stands."""
        number = int(self._indices[index])
        return str(self._whole.place(number)) if hasattr(self._whole, "place") else str(number)

    @property
    def parts(self) -> list[Part]:
        """The rows of each entry that are in this part."""
        borders = [np.searchsorted(self._indices, (part.first, part.end)) for part in self._whole.parts]
        return [Part(part.name, *at.tolist()) for part, at in zip(self._whole.parts, borders, strict=True)]

    def fingerprint(self) -> dict[str, Any]:
        """That of the whole, and which part this is."""
        return {**self._whole.fingerprint(), "part": self._name, "rows": len(self)}


class _Renumbered:
    """A method of the whole, called with the number within a part."""

    def __init__(self, method: Callable[[int], Any], indices: np.ndarray) -> None:
        self._method, self._indices = method, indices

    def __call__(self, index: int) -> Any:
        return self._method(int(self._indices[index]))


class SizedPart(DatasetPart):
    """Some of the samples of a data set that knows their sizes."""

    def item(self, index: int, epoch: int) -> Any:
        """Sample `index` as it is in an epoch."""
        return self._whole.item(int(self._indices[index]), epoch)

    @cached_property
    def sizes(self) -> list[Any]:
        """Size of each sample."""
        whole = self._whole.sizes
        return [whole[index] for index in self._indices.tolist()]


def split_dataset(dataset: Any, rate: float, seed: int, *, most: int | None = None) -> tuple[DatasetPart, DatasetPart]:
    """Training and validation part, chosen by the seed.

    Args:
        dataset: A map-style data set.
        rate: Share of the samples that go to validation.
        seed: Of the choice.
        most: Upper bound of the validation part.

    Raises:
        ConfigError: One of the parts would be empty.
    """
    if getattr(dataset, "streams", False):
        raise ConfigError(
            "streamed rows cannot be set aside: nobody knows how many there are",
            key="data.dataset_param.basic_parameters.val_rate",
            way_out="Give val_dataset, or set streaming: false.",
        )
    size = len(dataset)
    held_out = round(rate * size)
    if not 0 < held_out < size:
        raise ConfigError(
            f"{rate} of {size} samples leaves one side empty", key="data.dataset_param.basic_parameters.val_rate"
        )
    order = permutation(size, seed, _SPLIT_STREAM)
    validation = np.sort(order[:held_out])[:most]
    training = np.sort(order[held_out:])
    part = SizedPart if hasattr(dataset, "sizes") else DatasetPart
    return part(dataset, training, "training"), part(dataset, validation, "validation")
