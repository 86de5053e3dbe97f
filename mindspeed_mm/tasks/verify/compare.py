"""Compares what two ways of training produce in a step: loss, clip norm, every gradient, every weight.

Right plans agree to about 1e-15 in fp64, a wrong divisor or a lost reduction is off by 1e-3 and more; a bound of 1e-9
between the two needs no arguing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from mindspeed_mm.fsdp.train.hooks.step_record import StepRecord

SCALE_FLOOR = 1e-3
"""Deviations of tensors smaller than this are measured against it: nothing can be said about noise."""

QUANTITIES = {"loss": "loss", "gradients": "gradients", "grad_norm": "clip norm", "weights": "weights"}
"""Key of a record → its name for people, in the order of a step."""


class RecordsDifferError(ValueError):
    """Two records cannot be compared: their steps or their parameters are not the same."""


class Deviation(NamedTuple):
    """The largest difference of a quantity, relative to the largest entry of its reference."""

    value: float
    quantity: str
    """A key of `QUANTITIES`."""
    step: int
    name: str = ""
    """The parameter."""
    expected: float = 0.0
    """The entry of the reference where the two differ most."""
    found: float = 0.0
    """The same entry of what was measured."""

    @property
    def place(self) -> str:
        """The step of the deviation and, where there is one, its parameter, in words."""
        if not self.name:
            return f"step {self.step}"
        return f"step {self.step}, {self.name}"

    def __str__(self) -> str:
        return f"{self.value:.1e}  {self.quantity}, {self.place}: {self.found:.17g} instead of {self.expected:.17g}"


def deviations(
    reference: Sequence[StepRecord], measured: Sequence[StepRecord], *, first_step: int = 1
) -> Iterable[Deviation]:
    """The deviation of every quantity and parameter of consecutive steps.

    Args:
        reference: Of the plain computation.
        measured: The same steps computed in another way.
        first_step: Number of the first one.

    Raises:
        RecordsDifferError: One side has steps or parameters that the other lacks.
    """
    if len(reference) != len(measured):
        raise RecordsDifferError(f"{len(reference)} reference steps, {len(measured)} measured")
    for step, (expected, found) in enumerate(zip(reference, measured, strict=True), start=first_step):
        for quantity in ("loss", "grad_norm"):
            yield _deviation(expected[quantity], found[quantity], quantity, step)
        for quantity in ("gradients", "weights"):
            yield from _of_parameters(expected[quantity], found[quantity], quantity, step)


def worst_of(found: Iterable[Deviation]) -> dict[str, Deviation]:
    """Quantity → its largest deviation, the first of equal ones."""
    worst: dict[str, Deviation] = {}
    for deviation in found:
        if deviation.quantity not in worst or deviation.value > worst[deviation.quantity].value:
            worst[deviation.quantity] = deviation
    return worst


def _of_parameters(
    expected: Mapping[str, torch.Tensor | None], found: Mapping[str, torch.Tensor | None], quantity: str, step: int
) -> Iterable[Deviation]:
    if expected.keys() != found.keys():
        lacking = ", ".join(sorted(expected.keys() ^ found.keys()))
        raise RecordsDifferError(f"{QUANTITIES[quantity]}, step {step}: only one side has {lacking}")
    for name, tensor in expected.items():
        other = found[name]
        if tensor is not None and other is not None:
            yield _deviation(tensor, other, quantity, step, name)
        elif tensor is other:
            yield Deviation(0.0, quantity, step, name)
        else:
            yield Deviation(math.inf, quantity, step, name, _size_of(tensor), _size_of(other))


def _deviation(expected: torch.Tensor, found: torch.Tensor, quantity: str, step: int, name: str = "") -> Deviation:
    if expected.shape != found.shape:
        return Deviation(math.inf, quantity, step, name)
    if not expected.numel():
        return Deviation(0.0, quantity, step, name)
    expected, found = expected.double().flatten(), found.double().flatten()
    difference = (expected - found).abs()
    place = int(difference.nan_to_num(nan=math.inf).argmax())
    scale = max(float(expected.abs().max()), SCALE_FLOOR)
    value = float(difference[place]) / scale
    value = math.inf if math.isnan(value) else value
    return Deviation(value, quantity, step, name, float(expected[place]), float(found[place]))


def _size_of(tensor: torch.Tensor | None) -> float:
    """Largest entry; NaN of what is not there."""
    return math.nan if tensor is None else float(tensor.abs().max())
