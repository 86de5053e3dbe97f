"""FLOPs of a training step by module, as coefficients of what a batch is made of.

A multiplication and an addition are two. Counted are matrix products, convolutions and attention; norms, activations,
rotations, softmax and the optimizer are not. Work on padding, on zeros for an absent modality, and what an attention
kernel computes twice by itself is not counted either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.patterns import pattern_of
from mindspeed_mm.fsdp.tools.flops_tool.units import Lengths, WorkUnit


class ModuleFlops(NamedTuple):
    """One kind of product of one module."""

    module: str
    """Name of the module; in a step's table `*` stands for the number of a block."""
    kind: str
    """linear, convolution, experts, attention, linear attention."""
    unit: WorkUnit
    forward: float
    """FLOPs for each unit."""
    gradients: float
    """Backward FLOPs as a multiple of the forward product: up to 2 where inputs and weights have a gradient."""
    again: bool = False
    """Whether the forward product is done again in the backward pass."""


class Flops(NamedTuple):
    """FLOPs of one step: forward, backward, and forward passes that are computed again."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0

    @property
    def model(self) -> float:
        """What the step needs: the numerator of MFU."""
        return self.forward + self.backward

    @property
    def hardware(self) -> float:
        """What is done, recomputation counted: the numerator of HFU."""
        return self.model + self.recompute

    def __add__(self, other: object) -> Flops:
        assert isinstance(other, Flops)
        return Flops(*(own + more for own, more in zip(self, other, strict=True)))


class ByConvention(NamedTuple):
    """The same step by the two conventions of attention."""

    causal: Flops
    full: Flops


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of a model's training step."""

    works: tuple[ModuleFlops, ...]
    lengths: Callable[[Batch], Lengths]
    """What a batch on the host is made of."""
    uncounted: tuple[str, ...] = ()
    """Modules whose work is not known here."""

    def beside(self, other: FlopCount, name: str) -> FlopCount:
        """With the forward pass of another model over the same batches, without its adapters and its backward pass.

        Args:
            other: Of that model, or this one.
            name: What stands in front of its modules in tables.
        """
        theirs = tuple(work for work in other.works if work.kind != "adapter")
        return self.with_part(replace(other, works=theirs).forward_alone(), name)

    def with_part(self, other: FlopCount, name: str, times: float = 1.0) -> FlopCount:
        """With other work over the same batches.

        Args:
            other: What is done.
            name: What stands in front of its modules in tables.
            times: How often, on the average of a step's batches.
        """
        part = (work._replace(module=f"{name}: {work.module}", forward=times * work.forward) for work in other.works)
        return replace(self, works=(*self.works, *part))

    def forward_alone(self) -> FlopCount:
        """The same work without its backward pass."""
        return replace(self, works=tuple(work._replace(gradients=0.0, again=False) for work in self.works))

    def in_order(self, sequence: str) -> FlopCount:
        """The same work where attention within this sequence does not look ahead."""
        works: list[ModuleFlops] = []
        for work in self.works:
            looks_within = work.unit.rows == work.unit.keys == sequence
            if looks_within:
                work = work._replace(unit=work.unit._replace(mask="causal"))
            works.append(work)
        return replace(self, works=tuple(works))

    def of(self, lengths: Lengths) -> ByConvention:
        """Of a batch of these lengths."""
        return _sum(self.works, lengths)

    def by_module(self, lengths: Lengths) -> dict[tuple[str, str], ByConvention]:
        """(module with `{*}` for numbers of blocks, kind) → its part, in the order of the model."""
        groups: dict[tuple[str, str], list[ModuleFlops]] = {}
        for work in self.works:
            groups.setdefault((pattern_of(work.module), work.kind), []).append(work)
        return {group: _sum(works, lengths) for group, works in groups.items()}

    def meter(self) -> Callable[[Sequence[Batch]], dict[str, float]]:
        """A function for the training loop: FLOPs of its micro-batches by name, from host numbers alone. Works of one
        unit are added up beforehand, so that a call costs microseconds."""
        forward, all_of_it = _by_unit(self.works, lambda w: 1 + w.gradients), _by_unit(self.works, lambda w: w.again)

        def measure(batches: Sequence[Batch]) -> dict[str, float]:
            found = dict.fromkeys(METERED, 0.0)
            for batch in batches:
                lengths = self.lengths(batch)
                for unit, flops in forward.items():
                    amount, again = unit.amount(lengths), all_of_it.get(unit, 0.0)
                    found["causal"] += flops * amount.causal
                    found["full"] += flops * amount.full
                    found["recompute"] += again * amount.causal
                    found["recompute_full"] += again * amount.full
            return found

        return measure


METERED = ("causal", "full", "recompute", "recompute_full")
"""What a meter tells of a step."""


def _sum(works: Iterable[ModuleFlops], lengths: Lengths) -> ByConvention:
    totals = [[0.0] * 3, [0.0] * 3]
    for work in works:
        amount = work.unit.amount(lengths)
        for total, units in zip(totals, (amount.causal, amount.full), strict=True):
            total[0] += work.forward * units
            total[1] += work.forward * work.gradients * units
            if work.again:
                total[2] += work.forward * units
    causal, full = (Flops(*total) for total in totals)
    return ByConvention(causal, full)


def _by_unit(works: Iterable[ModuleFlops], share: Callable[[ModuleFlops], float]) -> dict[WorkUnit, float]:
    found: dict[WorkUnit, float] = {}
    for work in works:
        found[work.unit] = found.get(work.unit, 0.0) + work.forward * share(work)
    return found
