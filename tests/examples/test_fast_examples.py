"""Examples of large models take the fast way: nothing switches it off, and no more is computed again than memory asks
for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.plan.outline import build_outline
from mindspeed_mm.fsdp.train.memory.forecast import forecast
from tests.helpers.released_examples import ROOT, Example, examples, full_batch

LEAST_BILLIONS = 4
SHARE = 0.92
"""Of a device, what is left beside the driver, the kernels' own memory and what the allocator loses."""
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
LARGE = [example for example in examples() if billions(example.name) >= LEAST_BILLIONS]


def test_no_example_switches_the_fast_way_off() -> None:
    assert len(FILES) > 60
    for path in FILES:
        features = load_config(path).arguments.features
        assert (features.compile, features.fused_kernels) == ("auto", "auto"), path
        assert features.recompute, path


@pytest.mark.slow
@pytest.mark.parametrize("example", LARGE, ids=lambda example: Path(example.name).stem)
def test_no_more_is_computed_again_than_memory_asks_for(example: Example, tmp_path: Path) -> None:
    """Results of products are kept where a step of the released model fits its devices with them."""
    arguments = example.arguments(tmp_path / "model", "features.recompute_plan.mode=selective")
    batch = full_batch(build_outline(arguments).model, arguments)
    needed = forecast(arguments, batch, world_size=example.promise.devices, device_type="cuda").peak / 2**30
    fits = needed < SHARE * example.promise.gigabytes
    print(f"{example.name}: {needed:.1f} GiB of {example.promise.gigabytes} GB with selective recomputation")
    mode = load_config(example.path).arguments.features.recompute_plan.mode
    assert mode == ("selective" if fits else "full")
