"""Examples of large models take the fast way: nothing switches it off."""

from __future__ import annotations

import re

from mindspeed_mm.fsdp.params.loader import load_config
from tests.helpers.released_examples import ROOT

LEAST_BILLIONS = 4
_SIZE = re.compile(r"_(\d+(?:\.\d+)?)([BT])_")


def billions(name: str) -> float:
    """Parameters by a file's name; 0 where it names none."""
    found = _SIZE.search(name)
    return float(found[1]) * {"B": 1, "T": 1000}[found[2]] if found else 0.0


FILES = sorted(
    path
    for path in (ROOT / "examples").glob("*/*_config*.yaml")
    if billions(path.name) >= LEAST_BILLIONS and "fsdp2_config" not in path.name
)


def test_no_example_switches_the_fast_way_off() -> None:
    assert len(FILES) > 60
    for path in FILES:
        features = load_config(path).arguments.features
        assert (features.compile, features.fused_kernels) == ("auto", "auto"), path
        assert features.recompute, path
