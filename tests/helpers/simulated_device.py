"""PyTorch's simulated accelerator, `torch_openreg`: memory of its own, streams, events and two devices on a CPU.

Its limits, and how the tests in `tests/device` live with them:

- It has no kernels of its own; a kernel runs on the host when it is launched. Only copies are late, and only speed is
  not shown. Attention takes the math form, which adds in another order: numbers agree to `TOLERANCE`, not to the bit.
- Its race checker knows streams, events, `record_stream` and frees. FSDP2 allocates reduced gradients on a queue of its
  own, which waits for the optimizer before it is used again; the checker sees the memory and not the wait, and reports
  the kernel that wrote a gradient last. `races` leaves out this one kind: the optimizer's kernels, never a copy.
- It is built for one release of Python and torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from tests.helpers.runs import lines, tensors

NAME = "openreg"
ENVIRONMENT = {"OPENREG_RACE": "1", "OPENREG_COPY_DELAY_US": "1000"}
"""Check for races; copies are a millisecond late."""
TOLERANCE = 2e-4
"""Of losses and gradient norms, relative."""
_RACE = re.compile(r"\[openreg-race\] .*")
_REDUCED_GRADIENT = re.compile(r"freed while aten::(_fused_adamw_|_foreach_mul_) writes it")


def is_installed() -> bool:
    """Whether this environment has it; looked up without loading it."""
    return importlib.util.find_spec("torch_openreg") is not None


def turn_on_checker() -> None:
    """Call it before the first tensor is made on the device; processes started from here on inherit it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """While inside, there is no accelerator."""
    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=False),
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=None),
    ):
        yield


def races(written: str) -> list[str]:
    """What the checker reported to standard error."""
    return [race for race in _RACE.findall(written) if not _REDUCED_GRADIENT.search(race)]


def differing_figures(measured: Path, expected: Path, tolerance: float = TOLERANCE) -> list[str]:
    """Steps whose loss or gradient norm differ, and weights of the newest checkpoint, or their average, that do."""
    ours, theirs = _figures(measured), _figures(expected)
    assert ours and ours.keys() == theirs.keys(), (ours, theirs)
    found = [
        f"{key}: {ours[key]} instead of {theirs[key]}"
        for key in ours
        if not abs(ours[key] - theirs[key]) <= tolerance * abs(theirs[key])
    ]
    weights, others = tensors(measured), tensors(expected)
    assert weights.keys() == others.keys(), sorted(weights.keys() ^ others.keys())
    for name, tensor in weights.items():
        allowed = 10 * tolerance * others[name].double().norm() + 1e-6
        if name.startswith(("model.", "ema.")) and not (tensor.double() - others[name].double()).norm() <= allowed:
            found.append(name)
    return found


def _figures(run: Path) -> dict[tuple[int, str], float]:
    rows = [row for row in lines(run / "metrics.jsonl") if "loss" in row]
    return {(row["step"], name): row[name] for row in rows for name in ("loss", "grad_norm")}
