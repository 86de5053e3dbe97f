"""Sizes that generators take: what is valid, the nearest valid one, latents and tokens."""

from __future__ import annotations

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize

FLUX = MediaGeometry(spatial_ratio=8, temporal_ratio=1, patch=(1, 2, 2), latent_channels=16, is_video=False)
WAN = MediaGeometry(spatial_ratio=8, temporal_ratio=4, patch=(1, 2, 2), latent_channels=16, is_video=True)
LONG_PATCHES = MediaGeometry(spatial_ratio=8, temporal_ratio=1, patch=(1, 2, 3), latent_channels=16, is_video=False)
PIXELS = MediaGeometry(
    spatial_ratio=1, temporal_ratio=1, patch=(1, 2, 2), latent_channels=3, is_video=True, spatial_step=16
)


@pytest.mark.parametrize(
    ("geometry", "size", "shape", "tokens"),
    [
        (FLUX, MediaSize(1, 1024, 1024), (16, 128, 128), 4096),
        (FLUX, MediaSize(1, 768, 1360), (16, 96, 170), 4080),
        (WAN, MediaSize(81, 480, 832), (16, 21, 60, 104), 32_760),
        (WAN, MediaSize(81, 720, 1280), (16, 21, 90, 160), 75_600),
        (WAN, MediaSize(1, 480, 832), (16, 1, 60, 104), 1560),
        (PIXELS, MediaSize(8, 16, 32), (3, 8, 16, 32), 1024),
    ],
)
def test_latents_and_tokens(geometry: MediaGeometry, size: MediaSize, shape: tuple[int, ...], tokens: int) -> None:
    geometry.check(size)
    assert geometry.latent_shape(size) == shape
    assert geometry.tokens(shape) == tokens


@pytest.mark.parametrize(
    ("geometry", "size", "nearest", "rule"),
    [
        (WAN, MediaSize(80, 480, 832), MediaSize(81, 480, 832), "frames must be 4k+1"),
        (WAN, MediaSize(83, 480, 832), MediaSize(81, 480, 832), "frames must be 4k+1"),  # as near as 85
        (WAN, MediaSize(2, 480, 832), MediaSize(1, 480, 832), "frames must be 4k+1"),
        (WAN, MediaSize(81, 487, 830), MediaSize(81, 480, 832), "multiples of 16"),
        (WAN, MediaSize(81, 3, 832), MediaSize(81, 16, 832), "multiples of 16"),
        (FLUX, MediaSize(1, 1000, 1024), MediaSize(1, 992, 1024), "multiples of 16"),  # as near as 1008
        (FLUX, MediaSize(5, 1024, 1024), MediaSize(1, 1024, 1024), "images have one frame"),
        (LONG_PATCHES, MediaSize(1, 24, 48), MediaSize(1, 48, 48), "multiples of 48"),
        (PIXELS, MediaSize(7, 20, 30), MediaSize(7, 16, 32), "multiples of 16"),
    ],
)
def test_an_invalid_size_is_told_its_nearest(
    geometry: MediaGeometry, size: MediaSize, nearest: MediaSize, rule: str
) -> None:
    assert geometry.nearest(size) == nearest
    with pytest.raises(ConfigError) as caught:
        geometry.check(size, where="rows.jsonl:3", key="resolution")
    (problem,) = caught.value.problems
    assert rule in problem.what and problem.what.startswith(str(size))
    assert ("multiples" in problem.what) == ((size.height, size.width) != (nearest.height, nearest.width))
    assert problem.way_out == f"Use {nearest}."
    assert (problem.where, problem.key) == ("rows.jsonl:3", "resolution")
    geometry.check(nearest)
