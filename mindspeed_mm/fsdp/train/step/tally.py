"""What a step is made of, counted on the host before it starts and summed over data ranks; the step once it was handed
to the device, and what becomes of one that is not finite.

Whether a step is applied is decided on the device, so that the host need not know its numbers to go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import DivergedError
from mindspeed_mm.fsdp.loss.objectives import Objective, Terms
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.sampling.finite import first_bad_weight
from mindspeed_mm.fsdp.train.run.failures import shortened
from mindspeed_mm.fsdp.utils.device import ArrivingNumbers


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


@dataclass(frozen=True)
class LaunchedStep:
    """One optimizer step on its way through the device, with all that the host knew of it when it was handed over."""

    step: int
    names: list[str]
    """Of the loss terms, in the order in which `numbers` holds them; the gradient norm follows them."""
    numbers: ArrivingNumbers
    local_losses: Terms
    """This rank's share of each term, on the device."""
    samples: list[str]
    """Ids of this rank's."""
    lr: float
    tally: Tally
    began: float
    """By `time.perf_counter`: the step's time begins here."""
    data_seconds: float
    loss_scale: float | None
    at_once: bool
    """Whether all ranks wait for its numbers before anything of the next step is done."""

    def read(self) -> tuple[dict[str, float], float]:
        """Losses and gradient norm; waits until the device has come to them."""
        *losses, norm = self.numbers.tolist()
        return dict(zip(self.names, losses, strict=True)), norm


def left_out_on_device(numbers: torch.Tensor) -> torch.Tensor:
    """1.0 where a step is not finite and must not be applied, else 0.0: what torch's fused optimizers take as
    `found_inf`.

    Args:
        numbers: (n,), the losses and the norm; the same on all ranks.

    Returns:
        A 0-d fp32 tensor beside them, which is not read.
    """
    return numbers.isfinite().all().logical_not().to(torch.float32)


class RankOfStep(NamedTuple):
    """What a rank had to do with a step that is not finite."""

    rank: int
    is_finite: bool
    """Whether its own share of the loss is."""
    samples: list[str]
    bad_weight: str | None
    """The first of its weights that holds NaN or infinity."""


def over_ranks(
    launched: LaunchedStep, model: nn.Module, rank: int, group: dist.ProcessGroup | None
) -> list[RankOfStep]:
    """What every rank of the group had to do with a step; collective."""
    is_finite = all(math.isfinite(float(value)) for value in launched.local_losses.values())
    own = RankOfStep(rank, is_finite, launched.samples, first_bad_weight(model))
    if group is None:
        return [own]
    gathered = [own] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return gathered


def skipped_or_stopped(
    launched: LaunchedStep,
    losses: Mapping[str, float],
    norm: float,
    ranks: Sequence[RankOfStep],
    training: TrainingArguments,
    *,
    skipped_before: int,
    has_critic: bool = False,
) -> str:
    """A step that is not finite was not applied: say where it came from, and stop when the policy says so.

    Args:
        launched: The step.
        losses: Its loss terms.
        norm: Its gradient norm.
        ranks: What each rank had to do with it.
        training: The `training` section, with the policy.
        skipped_before: Steps in a row before it that were skipped.
        has_critic: Whether a critic is trained in front of the step's update.

    Raises:
        DivergedError: The policy says stop, too many were skipped in a row, or weights are not finite.
    """
    what = f"step {launched.step} is not finite (loss {sum(losses.values())}, gradient norm {norm})"
    terms = [name for name, value in losses.items() if not math.isfinite(value)]
    if 0 < len(terms) < len(losses):
        what = f"{what} in {', '.join(terms[:8])}"
    if bad := [f"rank {each.rank}: {each.bad_weight}" for each in ranks if each.bad_weight is not None]:
        raise DivergedError(
            f"{what}, and weights contain NaN or infinity: no sample is at fault, and no step can be",
            where="; ".join(bad[:8]),
            key="model.model_name_or_path",
            way_out="Start from an undamaged copy of the model or an earlier checkpoint. If both are whole, lower "
            "training.lr.",
        )
    # Where all losses are finite, it may be the gradient of any rank.
    suspects = [each for each in ranks if not each.is_finite] or ranks
    where = "; ".join(f"rank {each.rank}: samples {shortened(each.samples)}" for each in suspects[:8])
    key, way_out = "training.on_nonfinite", "Look at these samples and lower training.lr"
    if launched.loss_scale is not None:
        way_out += ", or compute in bf16 (parallel.fsdp_plan.param_dtype)"
    if training.on_nonfinite != "skip":
        way_out += ", or set training.on_nonfinite=skip"
    elif skipped_before < training.max_skipped_steps:
        return f"{what} and was skipped; {where}"
    else:
        key = "training.max_skipped_steps"
        way_out = f"{skipped_before} steps in a row were skipped before it. {way_out}"
    kept = "the weights are those of the step before"
    if has_critic:
        kept = f"{kept}, but for the critic's, which its own updates of this step have changed where they were finite"
    raise DivergedError(f"{what}; {kept}", where=where, key=key, way_out=f"{way_out}.")
