"""What a step is made of, counted on the host before it starts and summed over data ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.loss.labelled_rows import IGNORED_LABEL


@dataclass(frozen=True)
class Tally:
    """Counts of one optimizer step over all of its micro-batches."""

    counts: dict[str, int]
    """Each loss term's denominator."""
    samples: int
    tokens: int
    """Real tokens, padding left out."""
    label_tokens: int
    stop_requested: bool
    towers: dict[str, int]
    """Modality → how many ranks hold it in this step."""

    @property
    def denominators(self) -> dict[str, int]:
        """`counts`, never zero."""
        return {name: max(count, 1) for name, count in self.counts.items()}

    @classmethod
    def of(
        cls, batches: Sequence[Batch], counts: Mapping[str, int], stop_requested: bool, towers: Mapping[str, bool]
    ) -> Tally:
        """Tally of this rank's micro-batches."""
        return cls(
            counts=dict(counts),
            samples=sum(len(batch["sample_ids"]) for batch in batches),
            tokens=sum(_real_tokens(batch) for batch in batches),
            label_tokens=sum(int((batch["shift_labels"] != IGNORED_LABEL).sum()) for batch in batches),
            stop_requested=stop_requested,
            towers={name: int(present) for name, present in towers.items()},
        )

    def summed_over(self, group: dist.ProcessGroup) -> Tally:
        """The sum of every rank's tally, in one reduction of host numbers."""
        names, towers = sorted(self.counts), sorted(self.towers)
        fixed = [self.samples, self.tokens, self.label_tokens, int(self.stop_requested)]
        vector = torch.tensor([*(self.counts[n] for n in names), *(self.towers[t] for t in towers), *fixed])
        dist.all_reduce(vector, group=group)
        *varying, samples, tokens, label_tokens, stop = vector.tolist()
        return Tally(
            counts=dict(zip(names, varying, strict=False)),
            samples=samples,
            tokens=tokens,
            label_tokens=label_tokens,
            stop_requested=bool(stop),
            towers=dict(zip(towers, varying[len(names) :], strict=True)),
        )


def _real_tokens(batch: Batch) -> int:
    mask = batch.get("attention_mask")
    return int(mask.sum()) if mask is not None else batch["shift_labels"].numel()
