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
    """What the step costs, by the names of `flops_tool`; empty where they are not counted."""
    at_once: bool = False
    """Whether a rank asks for the numbers of the step before anything of the next one is done."""

    @property
    def denominators(self) -> dict[str, float]:
        """The counts by loss term, with 1 in place of 0, so that terms can be divided by them."""
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
        at_once: bool = False,
    ) -> Tally:
        """Tally of this rank's prepared micro-batches."""
        samples = real = slots = trained = 0
        for batch in batches:
            samples += len(batch["sample_ids"]) - batch.get("blank_rows", 0)
            if "input_ids" in batch:
                slots += batch["input_ids"].numel()
            tokens = objective.tokens(batch)
            real += tokens.real
            trained += tokens.trained
        return cls(
            counts=dict(objective.count(batches)),
            samples=samples,
            tokens=real,
            slots=slots,
            label_tokens=trained,
            bad_samples=bad_samples,
            stop_requested=stop_requested,
            towers={name: int(present) for name, present in towers.items()},
            flops=meter(batches) if meter is not None else {},
            at_once=at_once,
        )

    def summed_over(self, group: dist.ProcessGroup, counts_samples: bool = True) -> Tally:
        """The sum of every rank's tally, in one reduction of host numbers.

        Args:
            group: All ranks.
            counts_samples: False when another rank counts these samples: then only the wishes are this rank's.
        """
        # The same numbers in the same order on every rank: those with names in the order of their names.
        tables = [dict(sorted(table.items())) for table in (self.counts, self.towers, self.flops)]
        numbers: list[float] = [self.samples, self.tokens, self.slots, self.label_tokens, self.bad_samples]
        for table in tables:
            numbers += table.values()
        if not counts_samples:
            numbers = [0] * len(numbers)
        # Whole numbers are exact in fp64, and so are their sums.
        vector = torch.tensor([*numbers, self.stop_requested, self.at_once], dtype=torch.float64)
        dist.all_reduce(vector, group=group)
        samples, tokens, slots, label_tokens, bad_samples, *varying, stop, at_once = vector.tolist()
        summed = iter(varying)  # each table takes as many as it has names
        counts, towers, flops = (dict(zip(table, summed, strict=False)) for table in tables)
        return Tally(
            counts=counts,
            samples=int(samples),
            tokens=int(tokens),
            slots=int(slots),
            label_tokens=int(label_tokens),
            bad_samples=int(bad_samples),
            stop_requested=bool(stop),
            towers={name: int(ranks) for name, ranks in towers.items()},
            flops=flops,
            at_once=bool(at_once),
        )
