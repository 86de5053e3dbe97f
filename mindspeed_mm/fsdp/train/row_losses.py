"""The loss of each row of a data set under weights that stay as they are: the samples, the model and the objective of
training, in one process, without a step."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import DataError, ModelFolderError, UsageError
from mindspeed_mm.fsdp.checkpoint.base_weights import weights_folder_of_load
from mindspeed_mm.fsdp.checkpoint.committed import CommittedCheckpoint, open_checkpoint
from mindspeed_mm.fsdp.checkpoint.loading import load_tensors
from mindspeed_mm.fsdp.data.data_utils.sample import NothingTrainedError
from mindspeed_mm.fsdp.data.dataloader.fetch import Policy, completed
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick
from mindspeed_mm.fsdp.data.dataloader.sizes import read_sample
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.distributed.job.launch import initialize_distributed, resolve_launch
from mindspeed_mm.fsdp.distributed.parallel_state import init_parallel_state
from mindspeed_mm.fsdp.loss.build_head_loss import build_head_loss
from mindspeed_mm.fsdp.loss.objectives import ModelLoss, Objective, TokenCrossEntropy, build_objective
from mindspeed_mm.fsdp.models.lora.apply import take_from_base
from mindspeed_mm.fsdp.models.structure.spec import resolve_spec
from mindspeed_mm.fsdp.optimizer.ema import Ema
from mindspeed_mm.fsdp.params.argument import Arguments, TrainingArguments
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.fsdp.train.assemble import assemble
from mindspeed_mm.fsdp.train.run.job import leave, numerics
from mindspeed_mm.fsdp.train.train_engine import move
from mindspeed_mm.fsdp.utils.device import set_local_device
from mindspeed_mm.fsdp.utils.ranks import Ranks

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.utils.processor import Processor


@dataclass(frozen=True)
class RowLoss:
    """The loss of one row."""

    index: int
    """Index of the row in its data set."""
    total: float
    """Σ w · (−log p(token | before)) over its trained tokens; w is 1 where the row gives messages no weights."""
    weight: float
    """Σ w."""
    tokens: int
    """Trained ones."""


@dataclass(frozen=True)
class RowLeftOut:
    """A row that has no loss, as training has it."""

    index: int
    reason: str


@dataclass(frozen=True)
class LossModel:
    """A model with the objective that it is measured by."""

    model: nn.Module
    objective: Objective
    device: torch.device

    def of_batch(self, batch: Batch) -> tuple[list[float], list[float], list[int]]:
        """Total, weight and number of trained tokens of each sample of a collated batch; a model whose own loss is
        taken gives one for all of them."""
        prepared = self.objective.prepare(batch, training=False)
        if isinstance(self.objective, TokenCrossEntropy):
            prepared = self.objective.by_sample(prepared)
            tokens = (prepared["_weights"] != 0).sum(dim=0).tolist()
            weights = prepared["_weights"].sum(dim=0).tolist()
        else:
            weights = [float(prepared["_weight"])]
            tokens = [self.objective.tokens(prepared).trained]
        totals = self.objective.terms(self.model, move(prepared, self.device))["loss"]
        return totals.reshape(-1).tolist(), weights, tokens


@torch.no_grad()
def row_losses(
    measured: LossModel, dataset: MMDataset, collate: Callable[[Sequence[Any]], Batch], batch_size: int, seed: int
) -> Iterator[list[RowLoss | RowLeftOut]]:
    """The loss of every row in order, batch by batch.

    Args:
        measured: The model, in evaluation mode.
        dataset: Samples by number.
        collate: Samples → batch, each with a row of its own.
        batch_size: Rows that go through the model together; 1 for a loss that the model computes itself.
        seed: Of the random numbers that samples draw.

    Raises:
        DataError: A row is off, and the data set does not say that such rows are left out.
        ModelFolderError: The loss of a row is infinite or not a number.
    """
    if isinstance(measured.objective, ModelLoss):
        batch_size = 1
    policy = Policy(dataset)
    for start in range(0, len(dataset), batch_size):
        found: list[RowLoss | RowLeftOut] = []
        samples: dict[int, Any] = {}
        for index in range(start, min(start + batch_size, len(dataset))):
            try:
                samples[index] = read_sample(dataset, Pick(0, index), seed)
            except DataError as error:
                if not isinstance(error, NothingTrainedError):
                    policy.judge(error, str(dataset.place(index)))
                found.append(RowLeftOut(index, error.problems[0].what))
        if samples:
            batch = completed(collate(list(samples.values())), [str(dataset.place(index)) for index in samples])
            totals, weights, tokens = measured.of_batch(batch)
            for index, total, weight, count in zip(samples, totals, weights, tokens, strict=True):
                _check_is_number(total, str(dataset.place(index)))
                row = RowLoss(index, total, weight, count)
                found.append(row if row.weight else RowLeftOut(index, "no token of it is trained"))
        yield sorted(found, key=lambda each: each.index)


def _check_is_number(total: float, row: str) -> None:
    if not math.isfinite(total):
        raise ModelFolderError(
            f"the model returned a loss that is not a number: {total}",
            where=row,
            way_out="Try --batch-size 1, for a model that cannot do with padding, or weights of a type with a larger "
            "range (bf16, fp32). If it stays, look at the row and at the weights.",
        )


def loss_of_model(model: nn.Module, device: torch.device) -> LossModel:
    """A model of transformers that is loaded, on its device, computing in the type of its weights."""
    head = build_head_loss(model, resolve_spec(model).head, FeatureArguments())
    return LossModel(model.eval(), build_objective(None, model, head), device)


@contextmanager
def loss_of_run(arguments: Arguments, checkpoint: Path, processor: Processor) -> Iterator[tuple[LossModel, str]]:
    """The model of a run with the weights of a checkpoint, computing as the run does, and which weights these are:
    `ema` or `model`.

    Args:
        arguments: The run's configuration. Of its plan the types count: one process holds the model.
        checkpoint: A run folder, whose newest good checkpoint is taken, or one checkpoint.
        processor: What makes the rows.

    Raises:
        UsageError: The process is one of several ranks.
        MMError: The checkpoint or the model folder is off.
    """
    if resolve_launch(os.environ).world_size > 1:
        raise UsageError("the loss of rows is measured by one process", way_out="Start it without torchrun.")
    arguments = _for_one_process(arguments)
    joined_already = dist.is_initialized()
    _, local_rank, _ = initialize_distributed(timeout_s=arguments.training.setup_timeout_s)
    try:
        device = set_local_device(local_rank)
        init_parallel_state(resolve_parallel_sizes(arguments.parallel, 1), device.type)
        with numerics(arguments.training):
            found = open_checkpoint(checkpoint, Ranks(), arguments.training.verify_checkpoint)
            assembled = assemble(
                arguments, device, weights=_base_weights(arguments.training), load_weights=False, processor=processor
            )
            average = _load(found, assembled.model, arguments.training)
            raw = arguments.features.loss_cfg.loss_type == "raw"
            objective = build_objective("raw" if raw else None, assembled.model, assembled.applied.head)
            model = LossModel(assembled.model.eval(), objective, device)
            if average is None:
                yield model, "model"
            else:
                with average.applied():
                    yield model, "ema"
    finally:
        leave(joined_already, wait=False)


def _for_one_process(arguments: Arguments) -> Arguments:
    plan = arguments.parallel.fsdp_plan.model_copy(update={"reshard_after_forward": True})
    features = arguments.features.model_copy(update={"compile": False})  # would take longer than a pass
    return arguments.model_copy(update={"parallel": ParallelArguments(fsdp_plan=plan), "features": features})


def _base_weights(training: TrainingArguments) -> Path | None:
    if training.lora.enable:
        return weights_folder_of_load(training.load)
    return None


def _load(checkpoint: CommittedCheckpoint, model: nn.Module, training: TrainingArguments) -> Ema | None:
    """Fill the model; the average of its weights, where the run validates with it and the checkpoint holds it."""
    ema = training.ema
    average = Ema(model, ema) if ema.enable and ema.use_for_evaluation else None
    has_average = load_tensors(checkpoint, model, None, Ranks(), average)
    take_from_base(model)
    if has_average:
        return average
    return None
