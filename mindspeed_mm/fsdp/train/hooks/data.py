"""What became of the samples: told at the end of each epoch, and of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from mindspeed_mm.fsdp.data.data_utils.rows.unread import unread_told
from mindspeed_mm.fsdp.data.dataloader.dataloader import DataCounts
from mindspeed_mm.fsdp.train.run.data import RunLoader
from mindspeed_mm.fsdp.train.run.failures import shortened
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine


def data_hook(parts: RunParts) -> Hook:
    """The hook, which every run has."""
    return DataHook(parts.loader, parts.job.data_group, parts.record)


class DataHook(Hook):
    """Tells, at the end of each epoch and of the run, which samples could not be used as they stand.

    Args:
        loader: Counts on this rank; the counts of all ranks are told.
        group: Ranks that hold different samples; None for one process.
        record: Where the counts are told and written down.
    """

    def __init__(self, loader: RunLoader, group: dist.ProcessGroup | None, record: RunRecord) -> None:
        self._loader, self._group, self._record = loader, group, record
        self._epoch = loader.position.epoch

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Ranks tell each other of bad samples, so that all of them stop or none; people are told when an epoch is
        over."""
        if result.tally.bad_samples:
            found = _bad_samples(self._over_ranks())
            self._loader.learn_bad_samples(found)
        if self._loader.position.epoch != self._epoch:
            self._epoch = self._loader.position.epoch
            self._tell(engine)

    def on_train_end(self, engine: TrainEngine) -> None:
        """Tell of the whole run."""
        self._tell(engine)

    def on_failure(self, engine: TrainEngine) -> None:
        """Nothing: the other ranks may not be there to ask."""

    def _tell(self, engine: TrainEngine) -> None:
        if (mix := self._loader.mix) is not None:
            shares = mix.achieved()
            shown = ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
            self._record.event("mix", engine.iteration, f"mix so far: {shown}", shares=shares)
        counts = self._over_ranks()
        bad = _bad_samples(counts)
        shrunk = sum(each.shrunk for each in counts)
        too_long = sum(each.too_long for each in counts)
        unread = sum((each.unread for each in counts), Counter[str]())
        if unread:
            line = unread_told(unread, f"{sum(each.read for each in counts):,} samples so far")
            self._record.event("unread", engine.iteration, f"data: {line}", unread=dict(unread))
        if not (bad or shrunk or too_long):
            return
        line = (
            f"data so far: {len(bad)} bad samples were replaced or left out, {too_long} too long ones too, "
            f"{shrunk} were shortened"
        )
        if bad:
            line += f"; {shortened([f'{sample} ({reason})' for sample, reason in bad.items()], most=3)}"
        self._record.event("data", engine.iteration, line, bad=bad, shrunk=shrunk, too_long=too_long)

    def _over_ranks(self) -> list[DataCounts]:
        if self._group is None:
            return [self._loader.counts]
        gathered = [self._loader.counts] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, self._loader.counts, group=self._group)
        return gathered


def _bad_samples(counts: Sequence[DataCounts]) -> dict[str, str]:
    """Sample → reason, of all ranks."""
    bad: dict[str, str] = {}
    for each in counts:
        bad |= each.bad
    return bad
