"""A resumed run draws the numbers that the run would have drawn."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from mindspeed_mm.fsdp.train.run.random_state import capture_rng, restore_rng, seed_everything


@pytest.fixture(autouse=True)
def _own_numbers() -> Iterator[None]:
    """Other tests draw on as if these had drawn nothing."""
    pythons, numpys, torchs = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    seed_everything(3, 0)
    yield
    random.setstate(pythons)
    np.random.set_state(numpys)
    torch.random.set_rng_state(torchs)


def drawn() -> list[float]:
    """Of every generator, Gaussian numbers first: these come in pairs."""
    found = [random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand()]
    return [*found, *(torch.randn(1).item() for _ in range(2))]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_what_is_restored_draws_on(before: int) -> None:
    """After so many Gaussian numbers: of an odd one, the other half of the pair is still to come."""
    for _ in range(before):
        random.gauss(0, 1)
        np.random.randn()
    state = capture_rng()
    expected = [drawn(), drawn()]
    random.gauss(0, 1)
    np.random.randn()
    restore_rng(state)
    assert [drawn(), drawn()] == expected
    assert all(torch.isfinite(part.double()).all() for part in state.values())


def test_a_state_of_an_older_checkpoint_is_restored() -> None:
    state = capture_rng()
    expected = drawn()
    older = {name: part for name, part in state.items() if not name.endswith("_gauss")}
    random.gauss(0, 1)
    np.random.randn()
    restore_rng(older)
    assert drawn() == expected
