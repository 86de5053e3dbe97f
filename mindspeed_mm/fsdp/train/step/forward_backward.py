"""The plain forward-backward strategy: one micro-batch after another, gradients summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.loss.objectives import Objective, Terms
from mindspeed_mm.fsdp.models.forward_arguments import refusals_explained
from mindspeed_mm.fsdp.utils import ranges
from mindspeed_mm.fsdp.utils.ranges import named


class ForwardBackward(Protocol):
    """How a step's micro-batches go through the model; a pipeline schedule is another implementation."""

    def __call__(self, micro_batches: Sequence[Batch], denominators: Mapping[str, float]) -> Terms:
        """Accumulate gradients of Σ terms / denominators; returns this rank's share of each normalised term."""
        ...

    def evaluate(self, micro_batches: Sequence[Batch]) -> Terms:
        """Each term's sum over micro-batches, without gradients."""
        ...


def add_terms(totals: Terms, terms: Terms) -> None:
    """Add terms to totals, name by name."""
    for name, value in terms.items():
        if name in totals:
            value = totals[name] + value
        totals[name] = value


class PlainForwardBackward:
    """Forward and backward of each micro-batch in turn; gradients are communicated after the last one only.

    Args:
        model: The sharded model.
        objective: What to sum.
        set_gradient_sync: `(model, bool)`: whether the next backward communicates gradients.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, set_gradient_sync: Callable[[nn.Module, bool], None]
    ) -> None:
        self._model = model
        self._objective = objective
        self._set_gradient_sync = set_gradient_sync

    def __call__(self, micro_batches: Sequence[Batch], denominators: Mapping[str, float]) -> Terms:
        """Run forward and backward of each micro-batch; returns this rank's sum of each term divided by its
        denominator, detached."""
        totals: Terms = {}
        for index, batch in enumerate(micro_batches):
            if len(micro_batches) > 1:
                self._set_gradient_sync(self._model, index == len(micro_batches) - 1)
            with named(ranges.FORWARD):
                with refusals_explained(self._model, batch):
                    terms = self._objective.terms(self._model, batch)
                normalised = {name: value / denominators[name] for name, value in terms.items()}
            with named(ranges.BACKWARD):
                # One pass for all terms: they share the layers below.
                torch.stack(list(normalised.values())).sum().backward()
            add_terms(totals, {name: value.detach() for name, value in normalised.items()})
        return totals

    def evaluate(self, micro_batches: Sequence[Batch]) -> Terms:
        """Return each term's sum over the micro-batches; the caller switches gradients off."""
        sums: Terms = {}
        for batch in micro_batches:
            with refusals_explained(self._model, batch):
                add_terms(sums, self._objective.terms(self._model, batch))
        return sums


class PregatheredForwardBackward:
    """Another strategy, with all parameters gathered before its first micro-batch (`fsdp_plan.pregather`).

    Args:
        inner: What is done with the micro-batches.
        model: The sharded model.
        gathered: `(model)`: gathers when entered, lets go when left.
    """

    def __init__(
        self,
        inner: ForwardBackward,
        model: nn.Module,
        gathered: Callable[[nn.Module], AbstractContextManager[None]],
    ) -> None:
        self._inner, self._model, self._gathered = inner, model, gathered

    def __call__(self, micro_batches: Sequence[Batch], denominators: Mapping[str, float]) -> Terms:
        """Run the inner strategy on the micro-batches while all parameters are gathered, and return its terms."""
        with self._gathered(self._model):
            return self._inner(micro_batches, denominators)

    def evaluate(self, micro_batches: Sequence[Batch]) -> Terms:
        """Return the inner strategy's sums of terms; parameters are not gathered ahead."""
        return self._inner.evaluate(micro_batches)
