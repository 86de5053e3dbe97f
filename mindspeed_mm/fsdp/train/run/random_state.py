"""Every random-number generator of a process as tensors, so that a resumed run draws the same numbers."""

from __future__ import annotations

import random

import numpy as np
import torch

from mindspeed_mm.fsdp.utils import device


def seed_everything(seed: int, rank: int, step: int = 0) -> None:
    """Seed python, numpy and torch from (seed, rank, step): no two of these share a stream. Ranks draw different
    numbers (dropout); weights do not depend on these."""
    own = int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)[0])
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own % 2**63)


def capture_rng() -> dict[str, torch.Tensor]:
    """State of python's, numpy's, torch's CPU and the device's generators."""
    version, internal, pythons_next = random.getstate()
    _, keys, position, has_next, numpys_next = np.random.get_state()
    return {
        "python": torch.tensor([version, *internal], dtype=torch.int64),
        "numpy": torch.tensor([*np.asarray(keys, dtype=np.int64), position], dtype=torch.int64),
        "python_gauss": _kept(pythons_next is not None, pythons_next),
        "numpy_gauss": _kept(bool(has_next), float(numpys_next)),
        **{f"torch_{name}": state.clone() for name, state in device.rng_state().items()},
    }


def restore_rng(state: dict[str, torch.Tensor]) -> None:
    """Put back what `capture_rng` returned. Older checkpoints have no half of a pair of Gaussian numbers."""
    version, *internal = state["python"].tolist()
    random.setstate((version, tuple(internal), _next_gauss(state, "python_gauss")))
    *keys, position = state["numpy"].tolist()
    numpys_next = _next_gauss(state, "numpy_gauss")
    has_next, value = int(numpys_next is not None), numpys_next or 0.0
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_next, value))
    device.set_rng_state({name.removeprefix("torch_"): t for name, t in state.items() if name.startswith("torch_")})


def _kept(is_there: bool, gauss: float | None) -> torch.Tensor:
    """Both generators make Gaussian numbers in pairs, and keep the second one for the next call: whether there is one,
    and which."""
    return torch.tensor([is_there, gauss or 0.0], dtype=torch.float64)


def _next_gauss(state: dict[str, torch.Tensor], name: str) -> float | None:
    if name not in state or not state[name][0]:
        return None
    return float(state[name][1])
