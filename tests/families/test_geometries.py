"""The sizes that a family says it takes: its VAE gives them back, and its transformer has positions for them. What lies
beyond is refused with the nearest size that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import diffusers_class, load_encoders
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from tests.families.test_generators import make_run
from tests.helpers.runs import mm
from tests.helpers.tiny_generator_families import FAMILIES, smaller_pictures
from tests.helpers.tiny_video_families import make_tiny_ltx2

MAKERS: dict[str, Callable[[Path], Any]] = {
    **{name: family.make for name, family in FAMILIES.items() if family.task is None and "_i2v" not in name},
    "ltx2": make_tiny_ltx2,
}
BY_DEFAULT = ("flux", "sd3", "sana", "wan", "wan2_2_5b", "cogvideox", "cogvideox_1_5", "hunyuan_video", "ltx_video")
CASES = [pytest.param(name, marks=() if name in (*BY_DEFAULT, "ltx2") else pytest.mark.slow) for name in MAKERS]


def sizes_of(geometry: MediaGeometry) -> Iterator[MediaSize]:
    """The smallest, a wider one, and the first frame counts of clips, as far as there are positions."""
    least = geometry.nearest(MediaSize(1, 1, 1))
    wide = MediaSize(1, least.height, least.width + geometry.side_step)
    frames = [1 + geometry.frame_step * number for number in range(4)] if geometry.is_video else [1]
    for count in frames:
        for plane in (least, wide):
            yield geometry.nearest(MediaSize(count, plane.height, plane.width))


@pytest.mark.edge("BN2")
@pytest.mark.parametrize("name", CASES)
def test_a_vae_gives_back_every_size_that_is_taken(name: str, tmp_path: Path) -> None:
    MAKERS[name](tmp_path / "model")
    adapter = find_adapter(tmp_path / "model")
    geometry, encoders = adapter.geometry, load_encoders(adapter, torch.device("cpu"))
    for size in dict.fromkeys(sizes_of(geometry)):
        pixels = torch.randint(0, 256, (1, 3, size.frames, size.height, size.width), dtype=torch.uint8)
        latents = adapter.encode_media(encoders, pixels)
        assert tuple(latents.shape[1:]) == geometry.latent_shape(size), size
        own = latents[:, :, geometry.leading_frames :] if geometry.leading_frames else latents
        assert adapter.decode(encoders, own).shape == pixels.shape, size


@pytest.mark.edge("BN2")
@pytest.mark.parametrize("frames", [5, 13, 21])
def test_frames_that_cogvideox_does_not_give_back_are_refused(frames: int, tmp_path: Path) -> None:
    yaml = make_run("cogvideox", tmp_path)
    said = mm("check", yaml, f"data.dataset_param.preprocess_parameters.num_frames={frames}")
    assert said.code != 0 and "frames must be 8k+1. Use" in said.err + said.out
    asked = ("infer", tmp_path / "model", "--prompt", "a", "--size", "32x32", "--frames", frames, "--steps", 1)
    said = mm(*asked, "--out", tmp_path / "out")
    assert said.code != 0 and "frames must be 8k+1. Use" in said.err
    with smaller_pictures():  # what was refused is what the VAE of diffusers does not give back
        adapter = find_adapter(tmp_path / "model")
        encoders = load_encoders(adapter, torch.device("cpu"))
        clip = torch.zeros(1, 3, frames, 32, 32)
        assert encoders.vae.decode(encoders.vae.encode(clip).latent_dist.mode()).sample.shape[2] != frames


LIMITED: dict[str, tuple[Callable[[Path], Any], MediaSize, str]] = {
    "CogVideoX 1.5 beyond its table": (MAKERS["cogvideox_1_5"], MediaSize(9, 48, 64), "the height must be at most 32"),
    "CogVideoX 5B of a picture": (FAMILIES["cogvideox_i2v"].make, MediaSize(9, 32, 48), "the width must be 32"),
    "LTX-2 with one position": (make_tiny_ltx2, MediaSize(9, 32, 64), "the height must be at least 64"),
}
"""Case → its folder, a size that it does not take, and the rule."""


@pytest.mark.edge("BN5")
@pytest.mark.parametrize("name", LIMITED)
def test_sizes_without_positions_are_refused_with_the_nearest(name: str, tmp_path: Path) -> None:
    make, size, rule = LIMITED[name]
    make(tmp_path)
    geometry = find_adapter(tmp_path).geometry
    nearest = geometry.nearest(size)
    with pytest.raises(ConfigError, match=rule) as caught:
        geometry.check(size)
    assert caught.value.problems[0].way_out == f"Use {nearest}."
    geometry.check(nearest)


@pytest.mark.edge("BN5")
def test_mm_check_refuses_a_size_that_training_would_stumble_over(tmp_path: Path) -> None:
    yaml = make_run("cogvideox_i2v", tmp_path)
    with smaller_pictures():
        assert mm("check", yaml).code == 0
        said = mm("check", yaml, "data.dataset_param.preprocess_parameters.width=48")
    assert said.code != 0 and "the width must be 32. Use 9×32×32" in said.err + said.out
    content = YAML(typ="safe").load(yaml)
    content["data"]["dataset_param"]["preprocess_parameters"] = {"max_pixels": 32 * 32, "num_frames": 9}
    with yaml.open("w") as file:
        YAML().dump(content, file)
    with smaller_pictures():
        assert mm("check", yaml).code == 0  # of the shapes of this area the one that it takes


def largest(adapter: DiffusionAdapter) -> MediaSize:
    """The largest size that the family takes."""
    return adapter.geometry.nearest(MediaSize(1, 10**6, 10**6))


TABLES: dict[str, dict[str, Any]] = {
    "sd3": {"pos_embed_max_size": 4},
    "lumina2": {"axes_lens": [64, 8, 4]},
    "z_image": {"axes_lens": [64, 4, 3]},
    "wan": {"rope_max_seq_len": 4},
    "cogvideox_1_5": {"sample_height": 8, "sample_width": 6},
}
"""Family → the setting that limits its positions, with a small value."""


@pytest.mark.edge("BN5")
@pytest.mark.parametrize("name", TABLES)
@torch.no_grad()
def test_a_transformer_runs_at_its_largest_size_and_not_beyond(name: str, tmp_path: Path) -> None:
    MAKERS[name](tmp_path)
    adapter = find_adapter(tmp_path, transformer=TABLES[name])
    transformer = diffusers_class(adapter.transformer_class).from_config(adapter.transformer_config).eval()
    size, step = largest(adapter), adapter.geometry.side_step
    forward(adapter, transformer, size)
    for beyond in (
        MediaSize(size.frames, size.height + step, size.width), MediaSize(size.frames, size.height, size.width + step)
    ):  # fmt: skip
        assert not adapter.geometry.takes(beyond)
        with pytest.raises((RuntimeError, ValueError, IndexError, AssertionError)):
            forward(adapter, transformer, beyond)


def forward(adapter: DiffusionAdapter, transformer: Any, size: MediaSize) -> None:
    noisy = torch.zeros(1, *adapter.geometry.latent_shape(size))
    config = adapter.transformer_config
    names = ("joint_attention_dim", "text_embed_dim", "cap_feat_dim", "text_dim")
    width = next(config[name] for name in names if config.get(name))
    tokens = adapter.text_tokens if name_of(adapter) == "CogVideoXTransformer3DModel" else 4
    batch: dict[str, Any] = {
        "latents": noisy,
        "prompt_embeds": torch.zeros(1, tokens, width),
        "prompt_mask": torch.ones(1, tokens, dtype=torch.int64),
        "pooled_prompt_embeds": torch.zeros(1, config.get("pooled_projection_dim") or 1),
    }
    sigma = torch.tensor([500]) if name_of(adapter) == "CogVideoXTransformer3DModel" else torch.tensor([0.5])
    transformer(**adapter.inputs(noisy, sigma, batch, 1.0), return_dict=False)


def name_of(adapter: DiffusionAdapter) -> str:
    return adapter.transformer_class
