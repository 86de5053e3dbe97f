"""Section D of the bad-input catalogue, and the confinement of media paths."""

from __future__ import annotations

import base64
import io
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils import media
from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import decode_image
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader, check_remote_media_off
from tests.fsdp.data.conftest import picture


def encoded(image: Image.Image, format_: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format_, **options)
    return buffer.getvalue()


def header_only(width: int, height: int) -> bytes:
    data = bytearray(encoded(Image.new("L", (1, 1))))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


BROKEN = {
    "html": (lambda: b"<html><body>404</body></html>", "not an image (starts with <html"),
    "json": (lambda: b'{"error": 1}', 'not an image (starts with {"error"'),
    "lfs": (lambda: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "half jpeg": (lambda: encoded(picture(256, 256), "JPEG")[:8000], "truncated"),
    "90 MP": (lambda: header_only(9500, 9500), "more than 67"),
    "196 MP": (lambda: header_only(14000, 14000), "too large"),
    "eps": (lambda: encoded(picture(), "EPS"), "format EPS not allowed"),
    "psd": (lambda: b"8BPS\x00\x01" + b"\x00" * 40, "format PSD not allowed"),
    "svg": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>', "format SVG not allowed"),
    "noise": (lambda: bytes(range(128, 256)), "not an image of an allowed format"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_sound_image_is_refused(case: str) -> None:
    make, message = BROKEN[case]
    with pytest.raises(DataError) as caught:
        decode_image(make(), "x.png")
    assert message in str(caught.value)
    assert "x.png" in str(caught.value)


def test_alpha_goes_on_white() -> None:
    rgba = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    rgba.putpixel((1, 0), (10, 20, 30, 255))
    assert list(decode_image(encoded(rgba)).getdata()) == [(255, 255, 255), (10, 20, 30)]
    la = Image.new("LA", (1, 1), (10, 0))
    assert decode_image(encoded(la)).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([10, 20, 30])
    assert decode_image(encoded(palette, transparency=0)).getpixel((0, 0)) == (255, 255, 255)
    assert decode_image(encoded(palette)).getpixel((0, 0)) == (10, 20, 30)
    keyed = Image.new("RGB", (1, 1), (9, 9, 9))
    assert decode_image(encoded(keyed, transparency=(9, 9, 9))).getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bit_gray_is_scaled_not_clipped() -> None:
    gray = Image.fromarray(np.array([[0, 40000, 65535]], dtype=np.uint16))
    values = [decode_image(encoded(gray)).getpixel((x, 0)) for x in range(3)]
    assert values == [(0, 0, 0), (156, 156, 156), (255, 255, 255)]


def test_cmyk_is_converted() -> None:
    assert decode_image(encoded(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG")).getpixel((4, 4)) == (255, 255, 255)


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP"])
def test_exif_rotation_is_honoured(format_: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = decode_image(encoded(picture(40, 20), format_, exif=exif))
    assert upright.size == (20, 40)


def test_the_first_frame_of_several_with_a_warning() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    with pytest.warns(UserWarning, match="several frames"):
        assert decode_image(data).getpixel((0, 0)) == (255, 0, 0)


class TestPaths:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        (tmp_path / "outside").mkdir()
        picture().save(tmp_path / "outside" / "secret.png")
        root = tmp_path / "data"
        (root / "sub").mkdir(parents=True)
        picture().save(root / "sub" / "a.png")
        (root / "link.png").symlink_to(tmp_path / "outside" / "secret.png")
        (root / "linked").symlink_to(tmp_path / "outside")
        (root / "fine.png").symlink_to(root / "sub" / "a.png")
        (root / "empty.png").touch()
        os.mkfifo(root / "pipe.png")
        return root

    @pytest.mark.parametrize("item", ["sub/a.png", "fine.png", "sub/../sub/a.png", {"path": "sub/a.png"}])
    def test_inside(self, root: Path, item: Any) -> None:
        loader = MediaLoader(root)
        assert loader.load_image(item).size == (32, 32)
        assert loader.load_image(str(root / "sub" / "a.png")).size == (32, 32)

    @pytest.mark.parametrize(
        "name",
        [
            "../outside/secret.png",
            "link.png",
            "linked/secret.png",
            "sub/../../outside/secret.png",
            "/etc/passwd",
            "..",
            "",
        ],
    )
    def test_outside_is_never_opened(self, root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(media.os, "open", lambda *_: pytest.fail("opened"))
        with pytest.raises(DataError, match=r"outside the media roots|not a media item"):
            MediaLoader(root).load_image(name)

    def test_further_roots(self, root: Path) -> None:
        outside = root.parent / "outside"
        assert MediaLoader(root, [outside]).load_image(str(outside / "secret.png")).size == (32, 32)
        (root.parent / "outside2").mkdir()
        picture().save(root.parent / "outside2" / "b.png")
        with pytest.raises(DataError, match="outside"):
            MediaLoader(root, [outside]).load_image(str(root.parent / "outside2" / "b.png"))

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("none.png", "not found"),
            ("sub", "not a regular file"),
            ("pipe.png", "not a regular file"),
            ("empty.png", "0 bytes"),
            ("http://x.org/a.png", "is a URL"),
            ("file:///etc/passwd", "is a URL"),
            ("data:image/png;base64,AAAA", "is not an image"),
            ("a\x00.png", "not a media item"),
        ],
    )
    def test_what_is_no_file_is_refused(self, root: Path, name: str, message: str) -> None:
        with pytest.raises(DataError, match=message):
            MediaLoader(root).load_image(name)

    def test_bytes_and_base64(self, root: Path) -> None:
        data = encoded(picture())
        for item in (data, {"bytes": data, "path": None}, {"bytes": base64.b64encode(data).decode()}):
            assert MediaLoader(root).load_image(item).size == (32, 32)
        with pytest.raises(DataError, match="not base64"):
            MediaLoader(root).load_image({"bytes": "!!"})
        with pytest.raises(DataError, match="not a media item"):
            MediaLoader(root).load_image({"bytes": None, "path": None})


def test_remote_media_say_that_they_are_not_built() -> None:
    check_remote_media_off(False)
    with pytest.raises(ConfigError, match="not built yet"):
        check_remote_media_off(True)
