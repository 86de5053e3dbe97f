"""The data of a run: its sets, built and compared over ranks, and the loaders that take batches out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.checkpoint.committed import CommittedCheckpoint
from mindspeed_mm.fsdp.checkpoint.loop_state import LoopState
from mindspeed_mm.fsdp.data import DataPosition, MMDataLoader, MMDataset, build_mm_dataloader, build_mm_dataset
from mindspeed_mm.fsdp.data.dataloader.dataloader import DataCounts
from mindspeed_mm.fsdp.data.dataloader.mixing import MixShares
from mindspeed_mm.fsdp.data.dataset import FirstEpochView
from mindspeed_mm.fsdp.params.argument import (
    DataArguments,
    ModelArguments,
    PosttrainArguments,
    TrainingArguments,
)
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.params.rules.distillation import micro_batches_of_step, reads_trajectories
from mindspeed_mm.fsdp.params.rules.posttrain import draws_samples
from mindspeed_mm.fsdp.params.run_length import run_length
from mindspeed_mm.fsdp.train.run.job import DataShare, Job
from mindspeed_mm.fsdp.utils.device import get_device_type

Pass = Callable[[], Iterator[list[Batch]]]
"""Makes a pass over samples: step after step, this rank's micro-batches."""


class RunOrder(Protocol):
    """The steps of a run's training data: how many there are, and where a resumed run goes on."""

    @property
    def batching(self) -> dict[str, Any]:
        """What decides how samples are put together, and must be the same when a run is resumed."""
        ...

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps until `epochs` epochs are done."""
        ...

    def go_on(self, position: DataPosition, before: Mapping[str, object] | None, *, may_skip: bool) -> str:
        """Take up a position that was saved; returns what to say of it, empty when nothing changes."""
        ...

    def learn_bad_samples(self, found: dict[str, str]) -> None:
        """What all ranks found, or a run found before it was stopped."""
        ...


class RunLoader(RunOrder, Protocol):
    """What a run asks of its training data: `MMDataLoader`, or another source of the micro-batches of steps."""

    dataset: MMDataset
    position: DataPosition
    counts: DataCounts
    mix: MixShares | None

    @property
    def most_tokens(self) -> int | None:
        """Of a micro-batch, where they are limited."""
        ...

    @property
    def estimate_note(self) -> str:
        """How steps were counted where they could not be; else empty."""
        ...

    @property
    def bad_samples(self) -> dict[str, str]:
        """Rows that could not be used → reason."""
        ...

    @property
    def untold_bad_samples(self) -> int:
        """How many of them the other ranks do not know of."""
        ...

    def describe(self) -> str:
        """Summarise the data in one phrase for the log, such as the number of samples and steps."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Numbers for the log, since the last call."""
        ...

    def __iter__(self) -> Iterator[list[Batch]]: ...


@dataclass(frozen=True)
class RunData:
    """The data sets of a run."""

    train: MMDataset
    """Samples that are trained on."""
    validation: MMDataset | None = None
    """Held-out samples; None: there is no validation."""


def build_data(data: DataArguments, training: TrainingArguments, posttrain: PosttrainArguments, job: Job) -> RunData:
    """The data sets that the configuration names. Encoding samples up front may take hours: one process does it, those
    that wait for it wait in no collective, and nothing limits them."""
    if draws_samples(posttrain):
        data = prompts_of(data)
    is_short = not any(section.basic_parameters.encodes_first for section in data.described.values())
    with job.setup("reading the data") if is_short else nullcontext():
        train, validation = build_mm_dataset(
            data.dataset_param, seed=training.seed, val_dataset_param=data.val_dataset_param
        )
    if reads_trajectories(posttrain):
        train = FirstEpochView(train)
    return RunData(train, validation)


def prompts_of(data: DataArguments) -> DataArguments:
    """The section with its rows as prompts, and none that are held out: what is sampled is measured by rewards."""
    param = data.dataset_param
    basic = param.basic_parameters.model_copy(update={"stage": "prompt"})
    param = param.model_copy(update={"basic_parameters": basic})
    return data.model_copy(update={"dataset_param": param, "val_dataset_param": None})


def build_loader(
    data: DataArguments,
    training: TrainingArguments,
    posttrain: PosttrainArguments,
    share: DataShare,
    dataset: MMDataset,
    packs: bool | None = None,
) -> MMDataLoader:
    """The loader of the training data, from the beginning on.

    Args:
        data: Workers, and how batches are collated.
        training: Size of a micro-batch, and the seed.
        posttrain: How many micro-batches a step has.
        share: Of this rank.
        dataset: The training data.
        packs: Put the samples of a micro-batch into one row, or each into its own; None: as configured.
    """
    return build_mm_dataloader(
        dataset,
        data.dataloader_param,
        packs=packs,
        micro_batch_size=training.micro_batch_size,
        gradient_accumulation_steps=micro_batches_of_step(training, posttrain),
        dp_rank=share.rank,
        dp_size=share.ranks,
        seed=training.seed,
        dataset_param=data.dataset_param,
        group=share.group,
        pixels_as_bytes=get_device_type() != "cpu",
    )


def build_pass_loader(
    data: DataArguments,
    training: TrainingArguments,
    share: DataShare,
    dataset: MMDataset,
    section: DatasetParam | None = None,
) -> MMDataLoader:
    """A loader for whole passes over a data set, beside the training: validation, or a look at the data before it.

    Args:
        data: How batches are collated.
        training: Size of a micro-batch, and the seed.
        share: Of this rank.
        dataset: Training data, or those of `section`.
        section: The section that the data set was built of; None: that of the training data.
    """
    param = data.dataloader_param
    return build_mm_dataloader(
        dataset,
        # In this process: workers of its own would cost more to start than a pass takes to read.
        param.model_copy(update={"num_workers": 0, "drop_last": False}),
        micro_batch_size=training.val_micro_batch_size or training.micro_batch_size,
        gradient_accumulation_steps=1,
        dp_rank=share.rank,
        dp_size=share.ranks,
        seed=training.seed,
        dataset_param=section or data.dataset_param,
        group=share.group,
        for_passes=True,
    )


def build_validation_loader(
    data: DataArguments, training: TrainingArguments, share: DataShare, dataset: MMDataset
) -> MMDataLoader:
    """The loader for passes over the held-out samples."""
    return build_pass_loader(data, training, share, dataset, data.val_dataset_param)


def total_steps_of(model: ModelArguments, training: TrainingArguments, order: RunOrder) -> int:
    """Optimizer steps of the whole run."""
    length = run_length(model, training)
    if length.steps is not None:
        return length.steps
    return max(1, order.steps_for(length.epochs or 1))


def go_on_in_data(order: RunOrder, checkpoint: CommittedCheckpoint, state: LoopState, *, accepts_change: bool) -> str:
    """Go on in the data where a checkpoint was saved.

    Args:
        order: Of the training data.
        checkpoint: Of a run.
        state: That it holds.
        accepts_change: The data may have changed since.

    Returns:
        What to say of it; empty when nothing changes.

    Raises:
        CheckpointError: The place in the data cannot be kept.
        DataError: Too many rows are bad.
    """
    position = DataPosition.from_dict(state["data_position"])
    note = order.go_on(position, checkpoint.context.get("batching"), may_skip=accepts_change)
    # Rows that were bad may have been repaired if the data changed.
    order.learn_bad_samples({} if accepts_change else state["bad_samples"])
    return note
