"""From rows to pixels: scaling and cropping, animated pictures, and every broken picture of the catalogue."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.data.data_utils import media as media_module
from mindspeed_mm.fsdp.data.data_utils.decoding.video import ClipSampling
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.datasets.generation.pixels import (
    MediaHeader,
    View,
    cover,
    inside,
    media_pixels,
    probe_media,
)
from mindspeed_mm.fsdp.data.datasets.generation.row import ColumnNames, GenerationRow, parse_row
from mindspeed_mm.fsdp.models.diffusion.media_roles import FURTHER_SOURCES, SOURCE_PICTURE
from tests.fsdp.data.conftest import picture
from tests.helpers.open_files import open_below
from tests.helpers.tiny_media import brightness, picture_bytes, wav_bytes, write_video


def row(media: str | bytes) -> GenerationRow:
    return GenerationRow(RowLocation("rows.jsonl", 1), media, ("a",))


@pytest.fixture
def pixels(tmp_path: Path) -> Callable[..., torch.Tensor]:
    def read(media: str | bytes, frames: int = 1, height: int = 16, width: int = 16, **sampling: Any) -> torch.Tensor:
        size = MediaSize(frames, height, width)
        return media_pixels(row(media), size, MediaLoader(tmp_path), ClipSampling(**sampling))

    return read


class TestPictures:
    def test_a_picture_of_the_size_asked_for_stays_as_it_is(
        self, tmp_path: Path, pixels: Callable[..., torch.Tensor]
    ) -> None:
        image = picture(16, 32)
        image.save(tmp_path / "a.png")
        found = pixels("a.png", height=32, width=16)
        assert found.dtype == torch.uint8
        assert found.is_contiguous()
        assert torch.equal(found, torch.from_numpy(np.asarray(image).transpose(2, 0, 1)[:, None].copy()))

    @pytest.mark.parametrize(("width", "height"), [(64, 16), (16, 64), (30, 31), (7, 200)])
    def test_covers_and_cuts_around_the_middle(self, width: int, height: int) -> None:
        """Against the same done in two steps, whole pixels at a time."""
        gradient = np.linspace(0, 255, width)[None, :, None] * np.ones((height, 1, 3))
        image = Image.fromarray(gradient.astype(np.uint8))
        found = cover(image, 16, 16)
        scale = max(16 / width, 16 / height)
        scaled = np.asarray(image.resize((round(width * scale), round(height * scale)), Image.Resampling.BICUBIC))
        top, left = (scaled.shape[0] - 16) // 2, (scaled.shape[1] - 16) // 2
        assert np.abs(found.astype(int) - scaled[top : top + 16, left : left + 16]).max() <= 9
        assert found.shape == (16, 16, 3)

    def test_shrinking_is_antialiased(self) -> None:
        stripes = np.zeros((64, 64, 3), np.uint8)
        stripes[:, ::2] = 255
        assert np.abs(cover(Image.fromarray(stripes), 16, 16)[:, 2:-2].astype(int) - 128).max() <= 8

    def test_upright_by_exif_in_header_and_pixels(self, tmp_path: Path, pixels: Callable[..., torch.Tensor]) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        image = Image.new("RGB", (32, 16), "black")
        image.paste("white", (0, 0, 16, 16))
        image.save(tmp_path / "a.jpg", exif=exif, quality=95)
        assert probe_media(row("a.jpg"), MediaLoader(tmp_path)) == MediaHeader(32, 16)
        upright = pixels("a.jpg", height=32, width=16)[0, 0].float()
        assert upright[:8].mean() > 200
        assert upright[-8:].mean() < 50

    def test_bytes_are_read_like_files(self, pixels: Callable[..., torch.Tensor]) -> None:
        image = picture(16, 16)
        assert torch.equal(pixels(picture_bytes(image))[:, 0], torch.from_numpy(np.array(image)).permute(2, 0, 1))
        assert probe_media(row(picture_bytes(image)), MediaLoader(".")) == MediaHeader(16, 16)


class TestClips:
    def test_a_video_file_and_the_same_in_memory(self, tmp_path: Path, pixels: Callable[..., torch.Tensor]) -> None:
        path = write_video(tmp_path / "a.mp4", [20 * i for i in range(10)], height=32, width=64)
        found = pixels("a.mp4", frames=5, height=16, width=32, frame_interval=2)
        assert found.shape == (3, 5, 16, 32)
        assert found.is_contiguous()
        assert np.abs(np.array(brightness(found)) - [0, 40, 80, 120, 160]).max() <= 3
        assert torch.equal(pixels(path.read_bytes(), frames=5, height=16, width=32, frame_interval=2), found)
        assert probe_media(row("a.mp4"), MediaLoader(tmp_path)) == MediaHeader(32, 64, 10, 16.0)
        assert pixels("a.mp4").shape == (3, 1, 16, 16)

    @pytest.mark.parametrize("kind", ["gif", "webp"])
    def test_animated_pictures_are_clips(self, kind: str, tmp_path: Path, pixels: Callable[..., torch.Tensor]) -> None:
        frames = [picture(16, 16, seed).convert("L") for seed in range(6)]
        frames[0].save(
            tmp_path / f"a.{kind}", save_all=True, append_images=frames[1:], duration=200, lossless=True, loop=0
        )
        assert probe_media(row(f"a.{kind}"), MediaLoader(tmp_path)) == MediaHeader(16, 16, 6, 5.0)
        every = pixels(f"a.{kind}", frames=6)
        for channel in every:
            assert torch.equal(channel, torch.from_numpy(np.stack([np.array(frame) for frame in frames])))
        assert torch.equal(pixels(f"a.{kind}", frames=3, frame_interval=2), every[:, ::2])
        assert torch.equal(pixels(f"a.{kind}", frames=3, fps=2.5), every[:, ::2])
        with pytest.raises(DataError, match="has 6 frames"):
            pixels(f"a.{kind}", frames=9)
        assert torch.equal(pixels(f"a.{kind}", frames=9, repeats_short=True)[:, 5:], every[:, 5:].expand(-1, 4, -1, -1))
        with pytest.warns(UserWarning, match="have several frames"):
            assert torch.equal(pixels(f"a.{kind}"), every[:, :1])


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _png_of(width: int, height: int) -> bytes:
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    data = picture_bytes(picture(16, 16))
    return data[:16] + header + zlib.crc32(b"IHDR" + header).to_bytes(4, "big") + data[33:]


BROKEN: dict[str, tuple[Callable[[], bytes], str]] = {
    "43 empty": (lambda: b"", r"is empty \(0 bytes\)"),
    "51 html": (lambda: b"<html><body>404</body></html>", "is not an image .starts with <html>"),
    "51 json": (lambda: b'{"error": 404}', "is not an image .starts with "),
    "52 half a jpeg": (lambda: _half(picture_bytes(picture(64, 64), "JPEG")), "is broken: .*truncated"),
    "54 90 megapixels": (lambda: _png_of(9500, 9500), "is 9500 × 9500 = 90 megapixels, more than 67"),
    "54 196 megapixels": (lambda: _png_of(14000, 14000), "is too large"),
    "60 eps": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n", "format EPS not allowed"),
    "60 heif": (lambda: b"\0\0\0\x18ftypheic" + bytes(64), "format HEIF .HEIC. not allowed"),
    "60 svg": (lambda: b"<svg xmlns='x'/>", "format SVG not allowed"),
    "a video": (lambda: b"\0\0\0\x18ftypisom" + bytes(64), "is not an image of an allowed format"),
    "a sound": (wav_bytes, "is not an image"),
    "pointer": (lambda: b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("case", BROKEN)
def test_catalogue_d(case: str, tmp_path: Path, pixels: Callable[..., torch.Tensor]) -> None:
    make, reason = BROKEN[case]
    (tmp_path / "bad.jpg").write_bytes(make())
    with pytest.raises(DataError, match=f"'bad.jpg' {reason}"):
        pixels("bad.jpg")


CONVERTED: dict[str, tuple[Callable[[], Image.Image], tuple[int, int, int]]] = {
    "56 alpha on white": (lambda: Image.new("RGBA", (16, 16), (10, 20, 30, 0)), (255, 255, 255)),
    "56 gray with alpha": (lambda: Image.new("LA", (16, 16), (100, 255)), (100, 100, 100)),
    "56 palette": (lambda: Image.new("RGB", (16, 16), (255, 0, 0)).convert("P"), (255, 0, 0)),
    "57 16-bit gray is scaled": (lambda: Image.fromarray(np.full((16, 16), 40000, np.uint16)), (156, 156, 156)),
}


@pytest.mark.parametrize("case", CONVERTED)
def test_catalogue_d_conversions(case: str, tmp_path: Path, pixels: Callable[..., torch.Tensor]) -> None:
    make, expected = CONVERTED[case]
    make().save(tmp_path / "a.png")
    assert pixels("a.png")[:, 0, 3, 3].tolist() == list(expected)


@pytest.mark.parametrize("path", ["missing.png", "folder", "pipe.png"])
def test_what_is_no_file(path: str, tmp_path: Path, pixels: Callable[..., torch.Tensor]) -> None:
    import os

    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(DataError, match=rf"'{path}' (not found|is not a regular file)"):
        pixels(path)


def test_files_are_closed_when_they_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(bytes(100))
    monkeypatch.setattr(media_module, "MAX_FILE_BYTES", 10)
    for _ in range(5):
        with pytest.raises(DataError, match="has 100 bytes, more than 10"):
            MediaLoader(tmp_path).read("a.png")
    assert open_below(tmp_path) == []


def test_a_picture_file_is_probed_by_its_header_alone(tmp_path: Path) -> None:
    data = picture_bytes(picture(64, 48), "JPEG")
    assert probe_media(row(data[: len(data) // 2]), MediaLoader(tmp_path)) == MediaHeader(48, 64)


def test_pictures_that_are_not_cut_have_white_around_them() -> None:
    picture = Image.new("RGB", (8, 4), (10, 20, 30))
    found = inside(picture, 16, 16)
    assert (found[4:12] == (10, 20, 30)).all()
    assert (found[:4] == 255).all() and (found[12:] == 255).all()
    picture.paste("black", (0, 0, 4, 4))
    assert np.array_equal(inside(picture, 16, 16, View(is_flipped=True)), inside(picture, 16, 16)[:, ::-1])


def test_a_column_may_hold_several_pictures() -> None:
    roles = (SOURCE_PICTURE, *FURTHER_SOURCES)
    place = RowLocation("rows.jsonl", 3)
    row = {"path": "a.png", "cap": "x", "source": ["b.png", "c.png"]}
    found = parse_row(row, place, ColumnNames(), roles=roles)
    assert found.roles == {"source": "b.png", "source_2": "c.png"}
    assert parse_row({**row, "source": "b.png"}, place, ColumnNames(), roles=roles).roles == {"source": "b.png"}
    apart = {**row, "source": "b.png", "source_3": "d.png"}
    assert parse_row(apart, place, ColumnNames(), roles=roles).roles == {"source": "b.png", "source_3": "d.png"}
    of_musubi = {"image_path": "a.png", "caption": "x", "control_path_0": "b.png", "control_path_1": "c.png"}
    assert parse_row(of_musubi, place, ColumnNames(), roles=roles).roles == {"source": "b.png", "source_2": "c.png"}
    with pytest.raises(DataError, match=r"rows.jsonl:3 .*source .*4 pictures, and the model takes 3 at most"):
        parse_row({**row, "source": ["b.png"] * 4}, place, ColumnNames(), roles=roles)
