"""The checkout of MindSpeed-MM that tests read where the environment names one; nothing of it is kept here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "MINDSPEED_MM_CHECKOUT"


def checkout() -> Path | None:
    """The checkout that the environment names; None where it names none."""
    named = os.environ.get(VARIABLE, "")
    folder = Path(named)
    return folder if named and (folder / "examples").is_dir() and (folder / "mindspeed_mm").is_dir() else None


OF_CHECKOUT = [
    pytest.mark.slow,
    pytest.mark.skipif(checkout() is None, reason=f"{VARIABLE} names no checkout of MindSpeed-MM"),
]
"""Marks of a test that reads it."""
