"""Data sets and loaders for functions of a user: what a data provider may build and return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data import MMDataLoader, MMDataset
from mindspeed_mm.fsdp.data import build_mm_dataloader as build_loader
from mindspeed_mm.fsdp.data import build_mm_dataset as build_datasets
from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state
from mindspeed_mm.fsdp.train.provider.live import LIVE, live_trainer

__all__ = ["MicroBatchLoader", "build_mm_dataloader", "build_mm_dataset"]


def build_mm_dataset(dataset_param: object = None) -> MMDataset | tuple[MMDataset, MMDataset]:
    """The data set that data.json names; with one for validation behind it, where it names rows for that.

    Args:
        dataset_param: `get_args().mm.data.dataset_param`, as it was read.

    Raises:
        ConfigError: It was changed, or no run is under way.
        DataError: Files are missing or broken.
    """
    arguments = live_trainer("build_mm_dataset").arguments
    _refuse_changed("dataset_param", dataset_param)
    train, held_out = build_datasets(
        arguments.data.dataset_param, seed=arguments.training.seed, val_dataset_param=arguments.data.val_dataset_param
    )
    if held_out is None:
        return train
    return (train, held_out)


def build_mm_dataloader(dataset: object, dataloader_param: object = None, **_: object) -> MicroBatchLoader:
    """The loader of this rank's micro-batches of a data set, in the order in which `mm train` reads it.

    Args:
        dataset: Of `build_mm_dataset`, or of your own.
        dataloader_param: `get_args().mm.data.dataloader_param`, as it was read.
        _: What MindSpeed-MM's function takes besides: groups, sections and places are those of the run.

    Raises:
        ConfigError: It was changed, or no run is under way.
    """
    _refuse_changed("dataloader_param", dataloader_param)
    return MicroBatchLoader(dataset)


class MicroBatchLoader:
    """Yields micro-batches without end, from the beginning each time.

    Args:
        dataset: Samples by number.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._first = self._build()

    def __len__(self) -> int:
        """Micro-batches of an epoch on this rank."""
        steps = self._first.steps_per_epoch
        if steps is None:
            raise TypeError("rows are streamed: their number is not known")
        return steps * self._first.deal.gradient_accumulation_steps

    def __iter__(self) -> Iterator[Batch]:
        """From the first one on."""
        for step in self._build():
            yield from step

    def _build(self) -> MMDataLoader:
        arguments, state = live_trainer("build_mm_dataloader").arguments, get_parallel_state()
        return build_loader(
            self._dataset,
            arguments.data.dataloader_param,
            micro_batch_size=arguments.training.micro_batch_size,
            gradient_accumulation_steps=arguments.training.gradient_accumulation_steps,
            dp_rank=state.data_rank,
            dp_size=state.data_size,
            seed=arguments.training.seed,
            dataset_param=arguments.data.dataset_param,
            group=state.axis_group("dp") if state.data_size > 1 else None,
        )


def _refuse_changed(name: str, given: object) -> None:
    """Raise for a section that a function has changed: what is built is the configuration, which was checked."""
    read = LIVE.data_json.get(name)
    as_dict = given.to_dict() if hasattr(given, "to_dict") else given
    if as_dict is not None and read is not None and as_dict != read:
        raise ConfigError(
            "is not what --mm-data says any more",
            key=f"data.{name}",
            way_out="Change the file, or build a data set or loader of your own.",
        )
