"""Buckets: which sizes there are, which one a medium goes to, and what the model does not take."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize
from mindspeed_mm.fsdp.data.datasets.generation.pixels import MediaHeader
from mindspeed_mm.fsdp.data.datasets.generation.sizes import ASPECTS, Buckets, SizeSettings
from mindspeed_mm.fsdp.params.data_args import PreprocessParameters

IMAGES = MediaGeometry(8, 1, (1, 2, 2), 16, is_video=False)
VIDEOS = MediaGeometry(8, 4, (1, 2, 2), 16, is_video=True)


def buckets(geometry: MediaGeometry = VIDEOS, **keys: Any) -> Buckets:
    return Buckets(SizeSettings.read(PreprocessParameters(**keys)), geometry)


def assigned(found: Buckets, height: int, width: int, frames: int = 1, fps: float = 16.0) -> str:
    return str(found.assign(MediaHeader(height, width, frames, fps if frames > 1 else 0.0)))


class TestWhichSizes:
    def test_one_size_or_several_frames(self) -> None:
        assert buckets(IMAGES, height=512, width=768).sizes == (MediaSize(1, 512, 768),)
        found = buckets(height=480, width=832, num_frames=[17, 81])
        assert found.sizes == (MediaSize(17, 480, 832), MediaSize(81, 480, 832))

    def test_a_list_of_sizes(self) -> None:
        expected = (MediaSize(81, 480, 832), MediaSize(1, 512, 512), MediaSize(17, 720, 1280))
        assert buckets(buckets=["480x832x81", "512x512", "720×1280×17"]).sizes == expected
        assert buckets(buckets="480x832x81, 512x512,720x1280x17").sizes == expected

    @pytest.mark.parametrize("area", [1024**2, 480 * 832, 64 * 64])
    def test_the_usual_aspects_of_an_area(self, area: int) -> None:
        found = buckets(IMAGES, max_pixels=area).sizes
        assert all(size.height * size.width <= area for size in found)
        assert all(size.height % 16 == size.width % 16 == 0 for size in found)
        assert any(size.height == size.width for size in found)
        if area > 10**5:
            assert len(found) == len(ASPECTS)
            assert all(size.height * size.width > 0.9 * area for size in found)

    def test_what_contradicts_is_told_at_once(self) -> None:
        with pytest.raises(ConfigError) as caught:
            buckets(height="tall", fps=-1, clip_position="end", buckets=["512"], num_frames=[4.5], short_clips="pad")
        assert {problem.key.rpartition(".")[2] for problem in caught.value.problems} >= {
            "height", "fps", "clip_position", "buckets", "num_frames", "short_clips",
        }  # fmt: skip
        for keys, reason in (
            ({"height": 512}, r"width  only one side is given"),
            ({"buckets": ["512x512"], "num_frames": 5}, "buckets  is given beside num_frames"),
            ({"max_pixels": 10**6, "height": 512, "width": 512}, "max_pixels  is given beside height"),
            ({"height": 512, "width": 512, "fps": 8, "frame_interval": 2}, "frame_interval  is given beside fps"),
            ({}, r"height  there is no size .* max_pixels"),
        ):
            with pytest.raises(ConfigError, match=reason):
                buckets(**keys)

    @pytest.mark.parametrize(
        ("keys", "reason"),
        [
            ({"height": 480, "width": 832, "num_frames": 80}, r"num_frames  80×480×832 .* 4k\+1. Use 81×480×832"),
            ({"height": 500, "width": 832, "num_frames": 5}, r"height  5×500×832 .* multiples of 16. Use 5×496×832"),
            ({"buckets": ["480x832x81", "470x832x82"]}, r"buckets  82×470×832 .* Use 81×464×832"),
        ],
    )
    def test_sizes_that_the_model_does_not_take(self, keys: dict[str, Any], reason: str) -> None:
        with pytest.raises(ConfigError, match=reason):
            buckets(**keys)

    def test_frames_of_an_image_model(self) -> None:
        with pytest.raises(ConfigError, match=r"num_frames  5×512×512 cannot be encoded: .*images have one frame"):
            buckets(IMAGES, height=512, width=512, num_frames=5)


class TestWhichBucket:
    FOUND = ("480x832x81", "480x832x17", "832x480x81", "720x1280x17", "512x512x33")

    @pytest.mark.parametrize(
        ("medium", "expected"),
        [
            ((480, 832, 100), "81×480×832"),  # its own
            ((480, 832, 40), "17×480×832"),  # the longest that it fills
            ((1080, 1920, 100), "17×720×1280"),  # by aspect first
            ((1000, 1733, 100), "81×480×832"),
            ((1920, 1080, 100), "81×832×480"),
            ((600, 620, 100), "33×512×512"),
            ((600, 620, 20), "17×480×832"),  # of those that it fills
            ((480, 832, 1), "480×832"),  # a picture
            ((1080, 1920, 1), "720×1280"),
        ],
    )
    def test_by_aspect_then_area_then_frames(self, medium: tuple[int, int, int], expected: str) -> None:
        assert assigned(buckets(buckets=list(self.FOUND)), *medium) == expected

    def test_of_one_aspect_the_nearest_in_area(self) -> None:
        found = buckets(IMAGES, buckets=["256x256", "512x512", "1024x1024"])
        assert [assigned(found, side, side) for side in (200, 300, 400, 700, 800, 3000)] == [
            "256×256", "256×256", "512×512", "512×512", "1024×1024", "1024×1024",
        ]  # fmt: skip

    def test_frames_are_counted_at_the_rate_of_the_clips(self) -> None:
        found = buckets(height=480, width=832, num_frames=[5, 9, 17], fps=8)
        assert assigned(found, 480, 832, frames=33, fps=16.0) == "17×480×832"
        assert assigned(found, 480, 832, frames=32, fps=16.0) == "9×480×832"
        assert assigned(found, 480, 832, frames=17, fps=8.0) == "17×480×832"
        every_third = buckets(height=480, width=832, num_frames=[5, 9], frame_interval=3)
        assert assigned(every_third, 480, 832, frames=25) == "9×480×832"
        assert assigned(every_third, 480, 832, frames=24) == "5×480×832"

    def test_short_clips(self) -> None:
        keys = {"height": 480, "width": 832, "num_frames": [9, 17]}
        with pytest.raises(DataError, match=r"'rows.jsonl:3' has 6 frames .* fewer than the 9 asked for"):
            buckets(**keys).assign(MediaHeader(480, 832, 6, 16.0), "rows.jsonl:3")
        assert assigned(buckets(**keys, short_clips="repeat"), 480, 832, frames=6) == "9×480×832"

    def test_own_lengths(self) -> None:
        found = buckets(height=480, width=832)
        lengths = {1: "480×832", 4: "480×832", 5: "5×480×832", 12: "9×480×832", 500: "81×480×832"}
        assert {frames: assigned(found, 480, 832, frames=frames) for frames in lengths} == lengths
        assert assigned(buckets(IMAGES, height=480, width=832), 480, 832, frames=30) == "480×832"

    @pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 10_000), (10_000, 1), (100, 2000)])
    def test_media_out_of_all_proportion(self, height: int, width: int) -> None:
        with pytest.raises(DataError, match=rf"medium is {height}×{width}: of the size 512×512 nearest to it"):
            assigned(buckets(IMAGES, height=512, width=512), height, width)

    def test_features_of_other_sizes_are_told(self) -> None:
        found = buckets(height=480, width=832, num_frames=17)
        assert found.takes(MediaSize(17, 480, 832))
        assert found.takes(MediaSize(1, 480, 832))
        assert not found.takes(MediaSize(33, 480, 832))
        assert not found.takes(MediaSize(17, 832, 480))
        assert buckets(height=480, width=832).takes(MediaSize(33, 480, 832))
