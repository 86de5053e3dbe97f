"""Examples of large models take the fast way: nothing switches it off, and no more is recomputed than memory asks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.plan.outline import build_outline
from mindspeed_mm.fsdp.train.memory.forecast import forecast
from tests.examples.test_small_cards import SHARE
from tests.helpers.released_examples import ROOT, VAE_OF, Example, examples, full_batch

LEAST_BILLIONS = 4
_SIZE = re.compile(r"_(\d+(?:\.\d+)?)([BTb])_")


def billions(name: str) -> float:
    """Parameters by a file's name; 0 where it names none."""
    found = _SIZE.search(name)
    return float(found[1]) * {"B": 1, "T": 1000}[found[2].upper()] if found else 0.0


FILES = sorted(
    path
    for path in (ROOT / "examples").glob("*/*_config*.yaml")
    if billions(path.name) >= LEAST_BILLIONS and "fsdp2_config" not in path.name
)
WITH_DEVICES = [each for each in examples() if each.path in FILES]
"""Which say of what memory their devices are."""


def test_no_example_switches_the_fast_way_off() -> None:
    assert len(FILES) > 60
    for path in FILES:
        features = load_config(path).arguments.features
        assert (features.compile, features.fused_kernels) == ("auto", "auto"), path
        assert features.recompute, path


@pytest.mark.slow
@pytest.mark.parametrize("example", WITH_DEVICES, ids=lambda example: example.path.stem)
def test_no_more_is_recomputed_than_memory_asks(example: Example, tmp_path: Path) -> None:
    """Selective where the forecast of a full micro-batch fits the devices that the file names."""
    needed = peak_gb(example, tmp_path, example.promise.devices)
    print(f"{example.path.stem}: {needed:.1f} of {example.promise.gigabytes} GB with selective recomputation")
    share = SHARE - (OF_PICTURES if example.family in VAE_OF else 0)
    assert says_selective(example.path) == (needed < share * example.promise.gigabytes)


OF_PICTURES = 0.05
"""Share of the memory for pictures that are encoded in the step: the full micro-batch of families that answer and draw
has words alone."""
SELECTIVE = "features.recompute_plan.mode=selective"


def says_selective(path: Path) -> bool:
    """Whether a file asks for it."""
    return load_config(path).arguments.features.recompute_plan.mode == "selective"


def peak_gb(example: Example, folder: Path, devices: int) -> float:
    """GiB of a step with selective recomputation."""
    arguments = example.arguments(folder / "model", SELECTIVE)
    batch = full_batch(build_outline(arguments).model, arguments)
    return forecast(arguments, batch, world_size=devices, device_type="cuda").peak / 2**30
