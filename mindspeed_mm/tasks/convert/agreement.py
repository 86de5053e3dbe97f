"""Whether two tensors of logits are the same but for rounding, element by element."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TOLERANCE = 1e-4
"""Of a logit's own size or of what is usual beside it. Both sides compute the same operations on the same numbers in
single precision; what orders of summation make of that is a hundredth of it."""


@dataclass(frozen=True)
class Agreement:
    """How far the logits of what was written are those of its source."""

    elements: int
    compared: int
    masked: int
    """That both sides set to the lowest number there is, or to minus infinity, as Chameleon does with pictures' tokens:
    they say nothing about weights."""
    not_finite: int
    """That are infinite or no number on both sides: the source itself does not compute them."""
    difference: float
    """The largest, relative to the size that `of` compares it with."""
    is_zero: bool
    """Every logit that was compared is zero on both sides."""
    worst: tuple[float, float] | None
    """The logit of the source and the one of what was written where they differ most, if by more than is allowed."""

    @classmethod
    def of(cls, source: torch.Tensor, written: torch.Tensor) -> Agreement:
        """Compare logits of shape (..., words).

        A difference is measured against the logit itself, or the median of its position or of its row of the
        vocabulary where that is larger: one row or position of huge numbers hides nothing in the others.
        """
        # (positions, words)
        source, written = (logits.double().flatten(0, -2) for logits in (source, written))
        lowest = torch.finfo(torch.float32).min
        masked = (source == written) & (source <= lowest)
        not_finite = ~source.isfinite() & ~written.isfinite() & ~masked
        counts = masked | not_finite
        # NaN: left out by nanmedian and fmax
        size = torch.where(counts | ~source.isfinite(), torch.nan, source.abs())
        usual = torch.fmax(size.nanmedian(dim=0, keepdim=True).values, size.nanmedian(dim=1, keepdim=True).values)
        allowed_beside = torch.fmax(size, usual)
        difference = (source - written).abs()
        relative = torch.where(difference == 0, 0.0, difference / allowed_beside)
        # below every real difference, so that `max` and `argmax` pass over what does not count
        relative = torch.where(counts, -1.0, relative.nan_to_num(torch.inf, torch.inf))
        most = float(relative.max())
        compared = int(counts.logical_not().sum())
        where = int(relative.argmax())
        worst = None
        if most > TOLERANCE:
            worst = float(source.flatten()[where]), float(written.flatten()[where])
        return cls(
            elements=source.numel(),
            compared=compared,
            masked=int(masked.sum()),
            not_finite=int(not_finite.sum()),
            difference=max(most, 0.0),
            is_zero=compared > 0 and not bool((size.nan_to_num(0.0) != 0).any()) and most <= 0,
            worst=worst,
        )

    def told(self) -> str:
        """How many logits were compared, and what is to be said about the others."""
        counted = f"{self.compared:,}"
        if self.compared != self.elements:
            counted += f" of {self.elements:,}"
        if self.is_zero:
            counted += ", every one of them zero"
        notes = [counted]
        if self.masked:
            notes.append(f"{self.masked:,} are masked on both sides")
        if self.not_finite:
            notes.append(f"{self.not_finite:,} are not finite in the source itself")
        return ", ".join(notes)
