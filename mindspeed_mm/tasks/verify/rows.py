"""Which rows a verification computes: all, or those that several processes can take together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from typing_extensions import override

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.build import DatasetPart, collator_of
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.plan.outline import build_outline
from mindspeed_mm.fsdp.train.run.data import RunData
from mindspeed_mm.fsdp.train.run.job import Job
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.tasks.verify.setup import STEPS, Setup

_MOST_ROWS = 512
"""Rows that are encoded to find such as agree."""


class PartTrainer(Trainer):
    """A trainer on some rows of the training data."""

    rows: Sequence[int] | None = None
    """Their numbers, ascending; None: all."""

    @override
    def _build_data(self, job: Job) -> RunData:
        data = super()._build_data(job)
        return data if self.rows is None else replace(data, train=part_of(data.train, self.rows))


def part_of(dataset: MMDataset, rows: Sequence[int]) -> DatasetPart:
    """Some rows of a data set."""
    return DatasetPart(dataset, np.asarray(rows), "verified")


def agreeing_rows(dataset: MMDataset, arguments: Arguments, setup: Setup) -> tuple[tuple[int, ...], str] | None:
    """The rows that are compared where the model's towers have no stand-in for a medium that a rank lacks, so that
    training in several processes refuses steps of which some rows have it and some have none.

    Args:
        dataset: The training rows.
        arguments: Comparable.
        setup: How many processes share a step, and how many rows it takes.

    Returns:
        Numbers of rows, and in words which were left out; None where all rows are compared.
    """
    keys = build_outline(arguments).spec.media_without_towers if setup.sizes.dp > 1 else ()
    if not keys or dataset.streams or dataset.sizes is not None:
        return None
    data = arguments.data
    collate = collator_of(dataset, data.dataloader_param, packs=False, dataset_param=data.dataset_param)
    groups: dict[tuple[str, ...], list[int]] = {}
    looked_at = min(len(dataset), _MOST_ROWS)
    for row in range(looked_at):
        with suppress(DataError):  # a row that cannot be used: whoever trains on it says so
            batch = collate([dataset.item(row, 0)])
            groups.setdefault(tuple(key for key in keys if batch.get(key) is not None), []).append(row)
    if len(groups) < 2:
        return None
    enough = setup.rows * STEPS
    held, rows = max(groups.items(), key=lambda group: (min(len(group[1]), enough), len(group[0])))
    what = f"those with {', '.join(held)}" if held else f"those without {', '.join(keys)}"
    told = (
        f"rows: {what}, {len(rows):,} of the first {looked_at:,}; the others are left out, since in several processes "
        "all rows of a step must have such media, or none"
    )
    return tuple(rows), told
