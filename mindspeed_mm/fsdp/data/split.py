"""A part of a data set, set aside for validation."""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import Part
from mindspeed_mm.fsdp.data.dataloader.sampler import permutation
from mindspeed_mm.fsdp.data.dataset import DatasetView, MMDataset

_SPLIT_STREAM = 2**64 - 1
"""Beside the streams of the epochs."""


class DatasetPart(DatasetView):
    """Some of the samples of a data set.

    Args:
        whole: The data set.
        indices: Which samples, ascending.
        name: For the fingerprint.
    """

    def __init__(self, whole: MMDataset, indices: np.ndarray, name: str) -> None:
        super().__init__(whole)
        self._indices, self._name = indices, name
        self.parts = [self._remaining(part) for part in whole.parts]
        if whole.sizes is not None:
            self.sizes = list(map(whole.sizes.__getitem__, indices.tolist()))
        if whole.is_prior is not None:
            self.is_prior = list(map(whole.is_prior.__getitem__, indices.tolist()))
        if whole.row_numbers is not None:
            self.row_numbers = list(map(whole.row_numbers.__getitem__, indices.tolist()))

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._whole[self._number(index)]

    def item(self, index: int, epoch: int) -> Any:
        """Sample `index` as it is in an epoch."""
        return self._whole.item(self._number(index), epoch)

    def fingerprint(self) -> dict[str, Any]:
        """That of the whole, and which part this is."""
        return {**self._whole.fingerprint(), "part": self._name, "rows": len(self)}

    def _number(self, index: int) -> int:
        return int(self._indices[index])

    def _remaining(self, part: Part) -> Part:
        """The rows of an entry that are in this part: they stay together, since the indices ascend."""
        first, end = np.searchsorted(self._indices, (part.first, part.end)).tolist()
        return Part(part.name, first, end)


def split_dataset(
    dataset: MMDataset, rate: float, seed: int, *, most: int | None = None
) -> tuple[DatasetPart, DatasetPart]:
    """Training and validation part, chosen by the seed.

    Args:
        dataset: The data set.
        rate: Share of the samples that go to validation.
        seed: Of the choice.
        most: Upper bound of the validation part.

    Raises:
        ConfigError: One of the parts would be empty.
    """
    if dataset.streams:
        raise ConfigError(
            "streamed rows cannot be held out: their number is not known",
            key="data.dataset_param.basic_parameters.val_rate",
            way_out="Give val_dataset, or set streaming: false.",
        )
    rows = np.arange(len(dataset)) if dataset.row_numbers is None else np.asarray(dataset.row_numbers)
    size = int(rows.max(initial=-1)) + 1
    held_out = round(rate * size)
    if not 0 < held_out < size:
        raise ConfigError(
            f"{rate} of {size} samples leaves one side empty", key="data.dataset_param.basic_parameters.val_rate"
        )
    order = permutation(size, seed, _SPLIT_STREAM)
    validation = np.sort(order[:held_out])[:most]  # each row once: these are the first samples of their rows
    training = np.flatnonzero(np.isin(rows, order[held_out:]))
    return DatasetPart(dataset, training, "training"), DatasetPart(dataset, validation, "validation")
