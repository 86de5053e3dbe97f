"""Both ways of a promise about the host's own work, beside which a device stands still."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import planning
from benchmarks.accelerator_promised_work import Results, Ways
from mindspeed_mm.fsdp.data.data_utils import packing
from mindspeed_mm.fsdp.data.dataloader.order import DataPosition
from mindspeed_mm.fsdp.distributed.expert.dispatch import plan_balance


def copies(_device: torch.device, tiny: bool, _folder: Path) -> Ways:
    """What a rank sends and receives, by its own row and column of the table, and by all of it."""
    ranks, experts = (8, 32) if tiny else (64, 256)
    loads = np.random.default_rng(0).exponential(64, (ranks, experts)).astype(np.int64)
    plan = plan_balance(loads, 2)

    def whole() -> Results:
        ends, shared = loads.cumsum(axis=0), plan.shares_RE.cumsum(axis=0)
        begin = np.maximum((ends - loads)[:, None], (shared - plan.shares_RE)[None])
        table = np.maximum(np.minimum(ends[:, None], shared[None]) - begin, 0)
        return [torch.from_numpy(table[1].copy()), torch.from_numpy(table[:, 1].copy())]

    return Ways(lambda: [torch.from_numpy(each) for each in plan.traffic_of(1, loads)], whole)


def ahead(_device: torch.device, tiny: bool, _folder: Path) -> Ways:
    """A turn of the trainer's thread that takes a packed step's plan, made beside it or by it."""
    order = planning.order_of(8 if tiny else 1024)
    steps = order.steps(DataPosition(0, 0), ahead=True)
    next(steps)
    position = DataPosition(0, 0)

    def beside() -> Results:
        planning.turn(steps)
        return []

    def by_itself() -> Results:
        nonlocal position
        position = order.step(position).after
        planning.turn()
        return []

    return Ways(beside, by_itself)


def best_fit(_device: torch.device, tiny: bool, _folder: Path) -> Ways:
    """Samples packed where patches bind, and where tokens do."""
    tokens, patches = planning.samples(200 if tiny else planning.FIT_SAMPLES).T

    def way(most: int) -> Any:
        def call() -> Results:
            packing.best_fit(tokens, planning.TOKENS, np.minimum(patches, most), most)
            return []

        return call

    return Ways(way(planning.SCARCE_PATCHES), way(planning.PATCHES))


def forecast(_device: torch.device, tiny: bool, folder: Path) -> Ways:
    """The peak of a step of a deep model, by one block of each kind and by all."""
    from benchmarks.accelerator_promised_steps import SMALL
    from benchmarks.accelerator_sizes import TINY
    from benchmarks.accelerator_step import arguments, batches, write_model_folder
    from mindspeed_mm.fsdp.train.memory.forecast import forecast as peak_of

    attempt = TINY if tiny else SMALL
    write_model_folder(attempt, folder)
    given, batch = arguments(attempt, folder, {}), batches(attempt, 0)[0]

    def way(*, whole: bool) -> Any:
        return lambda: [torch.tensor(peak_of(given, batch, device_type="cuda", whole=whole).peak)]

    return Ways(way(whole=False), way(whole=True))
