"""Asserts that two ways of training produce the same in a step: loss, gradient norm, every gradient, every weight.

Recorded and compared by what `mm verify` records and compares with.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mm.fsdp.train.hooks.step_record import StepRecord, full, record_step, record_weights
from mindspeed_mm.tasks.verify.run import Deviation, RecordsDifferError, deviations

__all__ = ["Deviation", "ParityError", "StepRecord", "compare_steps", "full", "record_step", "record_weights"]


class ParityError(AssertionError):
    """Two steps differ by more than the tolerance."""


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
    try:
        found = sorted(deviations(_as_list(reference), _as_list(measured)), reverse=True)
    except RecordsDifferError as error:
        raise ParityError(str(error)) from error
    worst = found[0]
    # Written so that NaN fails.
    off = [deviation for deviation in found if not deviation.value <= tolerance]
    if off:
        lines = "\n".join(f"  {deviation}" for deviation in off[:8])
        raise ParityError(f"{len(off)} of {len(found)} quantities deviate by more than {tolerance:g}:\n{lines}")
    print(f"largest deviation {worst}")
    return worst


def _as_list(steps: StepRecord | Sequence[StepRecord]) -> Sequence[StepRecord]:
    return [steps] if isinstance(steps, dict) else steps
