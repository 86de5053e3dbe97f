"""Two tensors of logits agree by size of each row and position, and what is left out is counted."""

from __future__ import annotations

import math

import pytest
import torch

from mindspeed_mm.tasks.convert.agreement import TOLERANCE, Agreement

LOWEST = torch.finfo(torch.float32).min


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(1, 16, 50, generator=torch.Generator().manual_seed(0))


def test_equal_logits_agree_to_the_bit(logits: torch.Tensor) -> None:
    found = Agreement.of(logits, logits.clone())
    assert (found.difference, found.worst, found.compared) == (0.0, None, 800)
    assert found.told() == "800"


def test_rounding_is_measured_and_more_is_not_allowed(logits: torch.Tensor) -> None:
    rounded = (logits.double() * (1 + 3e-7)).float()
    assert 1e-8 < Agreement.of(logits, rounded).difference < 1e-6
    other = logits.clone()
    other[0, 3, 7] += 3 * TOLERANCE * max(1.0, float(logits[0, 3, 7].abs()))
    worst = Agreement.of(logits, other).worst
    assert worst == (float(logits[0, 3, 7]), float(other[0, 3, 7]))


@pytest.mark.parametrize("place", [(0, slice(None), 7), (0, 4, slice(None))])
def test_one_huge_row_or_position_hides_nothing(place: tuple[object, ...], logits: torch.Tensor) -> None:
    logits[place] *= 1e6  # type: ignore[index]
    noisy = (
        logits.double() * (1 + 1e-6 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)))
    ).float()
    assert Agreement.of(logits, noisy).worst is None
    other = logits.clone()
    other[0, 9, 21] += 0.01
    assert Agreement.of(logits, other).worst is not None


def test_what_is_masked_on_both_sides_is_left_out_and_counted(logits: torch.Tensor) -> None:
    logits[..., 10:30] = LOWEST
    logits[..., 30:32] = -math.inf
    found = Agreement.of(logits, logits.clone())
    assert found.told() == "448 of 800, 352 are masked on both sides"
    other = logits.clone()
    other[0, 0, 0] += 0.1
    assert Agreement.of(logits, other).worst is not None
    other = logits.clone()
    other[0, 0, 12] = 0.0
    assert Agreement.of(logits, other).worst is not None  # on one side alone


def test_zeros_are_said_to_be_zeros() -> None:
    zeros = torch.zeros(1, 2, 3)
    assert Agreement.of(zeros, zeros).told() == "6, every one of them zero"
    other = zeros.clone()
    other[0, 1, 1] = 1e-30
    assert Agreement.of(zeros, other).worst is not None
    assert Agreement.of(other, zeros).worst is not None


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_the_source_does_not_compute_are_its_own(number: float, logits: torch.Tensor) -> None:
    source = logits.clone()
    source[0, 2] = number
    found = Agreement.of(source, source.clone())
    assert (found.worst, found.told()) == (None, "750 of 800, 50 are not finite in the source itself")
    assert Agreement.of(logits, source).worst is not None
    assert Agreement.of(source, logits).worst is not None
    nothing = Agreement.of(torch.full((1, 2, 3), number), torch.full((1, 2, 3), number))
    assert (nothing.compared, nothing.worst) == (0, None)


def test_rows_that_are_near_zero_at_every_position_do_not_raise_an_alarm() -> None:
    """All positions alike, and a row of the vocabulary that is perpendicular to them: its logits are rounding alone."""
    logits = torch.ones(1, 16, 50)
    logits[..., 3] = 1e-9
    other = logits.clone()
    other[..., 3] = -1e-7
    assert Agreement.of(logits, other).worst is None
