"""Weights from scratch are set whole: what memory held before is nowhere left in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.loader import load_config
from tests.helpers.released_rows import ROWS, write_run

QUICK = ("gemma4",)
"""Whose vision tower holds numbers in a module without parameters."""


def filled_with(value: float) -> Callable[..., torch.Tensor]:
    """`torch.empty` that finds a number in every place."""
    plain = torch.empty

    def empty(*args: object, **kwargs: object) -> torch.Tensor:
        tensor: torch.Tensor = plain(*args, **kwargs)  # type: ignore[call-overload]
        return tensor.fill_(value) if tensor.is_floating_point() and not tensor.is_meta else tensor

    return empty


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ROWS])
def test_memory_leaves_no_trace(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_config(write_run(ROWS[name], tmp_path), ["model.train_from_scratch=true"]).arguments.model
    found = []
    for value in (3.25, -7.5):
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", filled_with(value))
            built = ModelHub.build(model, param_dtype=torch.float64)
            ModelHub.load_weights(built, model, seed=0, device=torch.device("cpu"))
        found.append({**dict(built.named_parameters()), **dict(built.named_buffers())})
    assert [key for key, tensor in found[0].items() if not torch.equal(tensor, found[1][key])] == []
