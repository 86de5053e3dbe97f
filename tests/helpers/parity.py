"""Compares what two ways of training produce in a step: loss, gradient norm, every gradient, every weight.

Correct plans agree to about 1e-15 in fp64, a wrong divisor or a lost reduction is off by 1e-3 and more; 1e-10 between
the two needs no arguing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

StepRecord = dict[str, Any]
"""`loss` and `grad_norm`: 0-d tensors; `gradients` and `weights`: parameter name → full tensor, or None."""

SCALE_FLOOR = 1e-3
"""Deviations of tensors smaller than this are measured against it: nothing can be said about noise."""


class ParityError(AssertionError):
    """Two steps differ by more than the tolerance."""


class Deviation(NamedTuple):
    """Largest difference of a quantity, relative to the largest entry of its reference."""

    value: float
    what: str

    def __str__(self) -> str:
        return f"{self.value:.1e}  {self.what}"


def record_step(model: nn.Module, loss: torch.Tensor, grad_norm: torch.Tensor) -> StepRecord:
    """The record of a step whose backward pass is done; add the weights with `record_weights` after the update.

    Collective on a sharded model. `loss` is the loss of the whole global batch.
    """
    gradients = {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}
    return {"loss": full(loss), "grad_norm": full(grad_norm), "gradients": gradients, "weights": {}}


def record_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full copies of all parameters. Collective on a sharded model."""
    return {name: full(p) for name, p in model.named_parameters()}


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A plain copy of a tensor, gathered when it is sharded."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def compare_steps(
    reference: StepRecord | Sequence[StepRecord], measured: StepRecord | Sequence[StepRecord], tolerance: float
) -> Deviation:
    """Assert that steps agree and return (and print) the largest deviation with the quantity that has it.

    Args:
        reference: A step, or consecutive ones, of the plain computation.
        measured: The same steps under a plan.
        tolerance: Bound on every deviation, relative as in `Deviation`; 0 asks for equality to the bit.

    Raises:
        ParityError: With the worst quantities, or those that only one side has.
    """
    deviations = sorted(_deviations(_as_list(reference), _as_list(measured)), reverse=True)
    worst = deviations[0]
    # Written so that NaN fails.
    off = [deviation for deviation in deviations if not deviation.value <= tolerance]
    if off:
        lines = "\n".join(f"  {deviation}" for deviation in off[:8])
        raise ParityError(f"{len(off)} of {len(deviations)} quantities are off by more than {tolerance:g}:\n{lines}")
    print(f"largest deviation {worst}")
    return worst


def _as_list(steps: StepRecord | Sequence[StepRecord]) -> Sequence[StepRecord]:
    return [steps] if isinstance(steps, dict) else steps


def _deviations(reference: Sequence[StepRecord], measured: Sequence[StepRecord]) -> Iterable[Deviation]:
    if len(reference) != len(measured):
        raise ParityError(f"{len(reference)} reference steps, {len(measured)} measured")
    for number, (expected, found) in enumerate(zip(reference, measured, strict=True), start=1):
        for quantity in ("loss", "grad_norm"):
            yield Deviation(_difference(expected[quantity], found[quantity]), f"{quantity}, step {number}")
        for kind in ("gradients", "weights"):
            yield from _tensor_deviations(expected[kind], found[kind], f"{kind}, step {number}")


def _tensor_deviations(
    expected: Mapping[str, torch.Tensor | None], found: Mapping[str, torch.Tensor | None], what: str
) -> Iterable[Deviation]:
    if expected.keys() != found.keys():
        raise ParityError(f"{what}: only one side has {sorted(expected.keys() ^ found.keys())}")
    for name, tensor in expected.items():
        other = found[name]
        if tensor is None or other is None:
            yield Deviation(0.0 if tensor is other else float("inf"), f"{what}: {name}")
        else:
            yield Deviation(_difference(tensor, other), f"{what}: {name}")


def _difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    if expected.shape != found.shape:
        return float("inf")
    expected, found = expected.double(), found.double()
    scale = max(float(expected.abs().max()), SCALE_FLOOR) if expected.numel() else 1.0
    difference = float((expected - found).abs().max()) / scale if expected.numel() else 0.0
    return difference if difference == difference else float("inf")
