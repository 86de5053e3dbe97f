"""Counts as people read them."""

import pytest

from mindspeed_mm.core.counts import short_count


@pytest.mark.edge("U5")
@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0"), (5120, "5,120"), (200_000, "0.20 M"), (398_016, "0.40 M"), (8_030_261_248, "8.03 B")]
)
def test_no_count_is_rounded_away(count: int, shown: str) -> None:
    assert short_count(count) == shown
