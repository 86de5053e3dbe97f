"""What a step is made of, counted on the host before it starts and summed over data ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.loss.objectives import Objective


@dataclass(frozen=True)
class Tally:
    """Counts of one optimizer step over all of its micro-batches."""

    counts: dict[str, float]
    """Each loss term's denominator."""
    samples: int
    tokens: int
    """Real tokens, padding left out."""
    slots: int
    """Tokens that are computed, padding included; 0 where a batch has no token ids."""
    label_tokens: int
    bad_samples: int
    """Met since the last step, that not all ranks know of yet."""
    stop_requested: bool
    towers: dict[str, int]
    """Modality → how many ranks hold it in this step."""
    flops: dict[str, float] = field(default_factory=dict)
    """What the step costs, by the names of `flops_tool`; empty where nobody counts."""

    @property
    def denominators(self) -> dict[str, float]:
        """`counts`, never zero."""
        return {name: count or 1 for name, count in self.counts.items()}

    @classmethod
    def of(
        cls,
        objective: Objective,
        batches: Sequence[Batch],
        stop_requested: bool,
        towers: Mapping[str, bool],
        bad_samples: int = 0,
        meter: Callable[[Sequence[Batch]], dict[str, float]] | None = None,
    ) -> Tally:
        """Tally of this rank's prepared micro-batches."""
        tokens = [objective.tokens(batch) for batch in batches]
        return cls(
            counts=dict(objective.count(batches)),
            samples=sum(len(batch["sample_ids"]) - batch.get("blank_rows", 0) for batch in batches),
            tokens=sum(each.real for each in tokens),
            slots=sum(batch["input_ids"].numel() for batch in batches if "input_ids" in batch),
            label_tokens=sum(each.trained for each in tokens),
            bad_samples=bad_samples,
            stop_requested=stop_requested,
            towers={name: int(present) for name, present in towers.items()},
            flops=meter(batches) if meter is not None else {},
        )

    def summed_over(self, group: dist.ProcessGroup, counts_samples: bool = True) -> Tally:
        """The sum of every rank's tally, in one reduction of host numbers.

        Args:
            group: All ranks.
            counts_samples: False when another rank counts these samples: then only the wish to stop is this rank's.
        """
        names, towers, flops = sorted(self.counts), sorted(self.towers), sorted(self.flops)
        counted = [self.counts[n] for n in names] + [self.towers[t] for t in towers] + [self.flops[f] for f in flops]
        counted += [self.samples, self.tokens, self.slots, self.label_tokens, self.bad_samples]
        numbers = [*(number * counts_samples for number in counted), int(self.stop_requested)]
        vector = torch.tensor(numbers, dtype=torch.float64)  # whole numbers are exact in it, and so are their sums
        dist.all_reduce(vector, group=group)
        *varying, samples, tokens, slots, label_tokens, bad_samples, stop = vector.tolist()
        return Tally(
            counts=dict(zip(names, varying, strict=False)),
            samples=int(samples),
            tokens=int(tokens),
            slots=int(slots),
            label_tokens=int(label_tokens),
            bad_samples=int(bad_samples),
            stop_requested=bool(stop),
            towers={name: int(ranks) for name, ranks in zip(towers, varying[len(names) :], strict=False)},
            flops=dict(zip(flops, varying[len(names) + len(towers) :], strict=True)),
        )
