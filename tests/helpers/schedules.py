"""Which pipeline schedules the installed torch has, for tests of plans."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from mindspeed_mm.fsdp.distributed.pipeline.plan import is_schedule_right

ZBV = "parallel.pp_plan.schedule=zbv"
HAS_ZBV = is_schedule_right("zbv")


def is_possible(words: Collection[str]) -> bool:
    """Whether a run with these overrides is not refused for its schedule."""
    return HAS_ZBV or ZBV not in words


def case(name: str, words: Collection[str], *marks: pytest.MarkDecorator) -> object:
    """A test's parameter, skipped where the installed torch computes its schedule wrong."""
    skip = pytest.mark.skipif(not is_possible(words), reason="zbv needs a newer torch")
    return pytest.param(name, marks=[skip, *marks])
