"""Random numbers that a sample may draw: a function of what it is, not of who reads it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick


@contextmanager
def seeded(seed: int, pick: Pick) -> Iterator[None]:
    """Seed the random numbers that a sample may draw by what it is, not by who reads it; afterwards as before."""
    python, numpy, torch_ = random.getstate(), np.random.get_state(), torch.get_rng_state()
    number = derive_seed(seed, pick.epoch, pick.row)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number % 2**63)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_)
