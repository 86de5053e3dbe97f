"""One pass over preference pairs: what a reference thinks of them, for `posttrain.reference.kind: stored`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.loss.pair_objective import PairObjective
from mindspeed_mm.fsdp.models.behaviour.shared_media import RepeatedMedia
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.train.assemble import Assembled
from mindspeed_mm.fsdp.train.reference import assemble_reference
from mindspeed_mm.fsdp.train.run.data import build_data, build_pass_loader, build_validation_loader
from mindspeed_mm.fsdp.train.run.job import Job, joined
from mindspeed_mm.fsdp.train.stored_reference import StoredLogProbs, facts_of_reference
from mindspeed_mm.fsdp.train.train_engine import move


def stored_log_probs(arguments: Arguments, say: Callable[[int], None]) -> StoredLogProbs:
    """Log-probabilities of all pairs of the data sets, the same on every rank. Stages of a pipeline are not needed: the
    model is sharded alone.

    Args:
        arguments: The whole configuration.
        say: Told how many pairs are done, of all ranks.

    Raises:
        MMError: Model or data are off.
    """
    parallel = arguments.parallel.model_copy(update={"pipeline_parallel_size": 1})
    arguments = arguments.model_copy(update={"parallel": parallel})
    with joined(arguments) as job:
        data = build_data(arguments, job)
        sets = [each for each in (data.train, data.validation) if each is not None]
        loaders = [build_pass_loader(arguments, job.data_share, data.train)]
        if data.validation is not None:
            loaders.append(build_validation_loader(arguments, job.data_share, data.validation))
        stored = StoredLogProbs(facts_of_reference(arguments, sets))
        with job.setup("building the model"):
            work = ReferenceRun(arguments, assemble_reference(arguments, job.device), job)
        for loader in loaders:
            for batches in loader.one_pass():
                stored.merge(work.of_all_ranks(batches, dict(stored.facts)))
                say(len(stored.log_probs))
    return stored


class ReferenceRun:
    """What it takes to run micro-batches through the reference."""

    def __init__(self, arguments: Arguments, assembled: Assembled, job: Job) -> None:
        model, head = assembled.model, assembled.applied.head
        assert head is not None
        self._applied, self._job = assembled.applied, job
        self._objective = PairObjective(model, head, arguments.posttrain.dpo, None, RepeatedMedia(model))

    @torch.no_grad()
    def of_all_ranks(self, batches: Sequence[Batch], facts: dict[str, str]) -> StoredLogProbs:
        """Score the pairs of a step's micro-batches and merge those of all data ranks. Called by every rank."""
        prepared = [self._objective.prepare(batch, training=False) for batch in batches]
        self._let_towers_agree(prepared)
        found = StoredLogProbs(facts)
        for batch in prepared:
            context = self._applied.context
            own = move(batch if context is None else context.split(batch), self._job.device)
            found.add(batch, self._objective.answers(self._applied.model, own).cpu())
        if self._job.data_group is not None:
            for other in self._gathered(found):
                found.merge(other)
        return found

    def _let_towers_agree(self, prepared: Sequence[Batch]) -> None:
        towers = self._applied.towers
        if towers is not None:
            present = towers.present(prepared)
            everywhere = [present] if self._job.world_size == 1 else [None] * self._job.world_size
            if self._job.world_size > 1:
                dist.all_gather_object(everywhere, present)
            active: set[str] = set()
            for each in everywhere:
                active |= {name for name, is_here in (each or {}).items() if is_here}
            towers.set_active(active)

    def _gathered(self, found: StoredLogProbs) -> list[StoredLogProbs]:
        group = self._job.data_group
        assert group is not None
        everywhere: list[StoredLogProbs] = [found] * group.size()
        dist.all_gather_object(everywhere, found, group=group)
        return everywhere
