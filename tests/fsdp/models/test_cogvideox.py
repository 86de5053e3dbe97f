"""What CogVideoX's training does to a picture that is given, and the rotary tables that are kept from step to step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers.models.embeddings
import pytest
import torch
from torch._subclasses import FakeTensorMode

from mindspeed_mm.fsdp.models.cogvideox.modeling_cogvideox import CogVideoXAdapter, noised_picture
from mindspeed_mm.fsdp.models.diffusion.latents import model_range

CPU = torch.device("cpu")
SIZES = [(3, 8, 8), (3, 8, 4), (3, 4, 8), (1, 8, 8), (2, 4, 4)]


def test_a_given_picture_bears_noise_of_the_published_strength() -> None:
    """ln σ ~ N(−3, ½), another one for each picture, the same for the same picture in any batch."""
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (300, 3, 1, 16, 16), dtype=torch.uint8, generator=random)
    noise = noised_picture(pixels) - model_range(pixels)
    strengths = noise.flatten(1).std(dim=1).log()
    assert abs(float(strengths.mean()) + 3.0) < 0.12
    assert abs(float(strengths.std()) - 0.5) < 0.08
    assert torch.equal(noised_picture(pixels[7:8]), noised_picture(pixels)[7:8])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """All of a model's folder that rotary tables follow from."""
    (tmp_path / "transformer").mkdir()
    config = {"attention_head_dim": 16, "sample_width": 6, "sample_height": 4}
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "CogVideoXPipeline"}))
    return tmp_path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Grids of the tables that diffusers makes."""
    found: list[tuple[int, ...]] = []
    real = diffusers.models.embeddings.get_3d_rotary_pos_embed

    def noted(*, temporal_size: int, grid_size: tuple[int, int], **others: Any) -> Any:
        found.append((temporal_size, *grid_size))
        return real(temporal_size=temporal_size, grid_size=grid_size, **others)

    monkeypatch.setattr(diffusers.models.embeddings, "get_3d_rotary_pos_embed", noted)
    return found


def test_rotary_tables_of_the_sizes_seen_last_are_made_once(folder: Path, made: list[tuple[int, ...]]) -> None:
    """Each size has its own, on each device its own."""
    adapter = CogVideoXAdapter(folder)
    for _ in range(3):
        for size in SIZES[:4]:
            for ours, theirs in zip(
                adapter.rotary_tables(size, CPU), CogVideoXAdapter(folder).rotary_tables(size, CPU), strict=True
            ):
                assert torch.equal(ours, theirs)
    assert len(made) == 4 + 3 * 4
    assert adapter.rotary_tables(SIZES[0], torch.device("meta"))[0].is_meta
    made.clear()
    other = CogVideoXAdapter(folder)
    for size in (*SIZES, SIZES[-1], SIZES[0]):
        other.rotary_tables(size, CPU)
    assert len(made) == len(SIZES) + 1, "of five sizes the first is forgotten"


def test_what_is_simulated_or_made_without_gradients_is_not_in_the_way_of_training(folder: Path) -> None:
    adapter = CogVideoXAdapter(folder)
    with FakeTensorMode():
        assert type(adapter.rotary_tables(SIZES[0], CPU)[0]) is not torch.Tensor
    with torch.inference_mode():
        adapter.rotary_tables(SIZES[0], CPU)
    cosines, _ = adapter.rotary_tables(SIZES[0], CPU)
    weight = torch.ones((), requires_grad=True)
    (weight * cosines).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, cosines.sum())
