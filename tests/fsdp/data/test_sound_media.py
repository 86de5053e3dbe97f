"""Media that are whole, however they are written: in the row itself, in formats that Pillow reads, with long texts."""

from __future__ import annotations

import base64
import io
import json
import urllib.parse
import warnings
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils import media
from mindspeed_mm.fsdp.data.data_utils.convert import convert_row
from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import (
    IMAGE_FORMATS,
    IMAGE_SUFFIXES,
    ImageHeader,
    decode_image,
    probe_image,
)
from mindspeed_mm.fsdp.data.data_utils.media import MediaLimits, MediaLoader, with_media_beside
from mindspeed_mm.fsdp.data.data_utils.rows.sources import RowFormat
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.datasets.generation.row import ColumnNames, parse_row
from mindspeed_mm.fsdp.sampling.prompts import read_prompts
from tests.fsdp.data.conftest import picture
from tests.helpers.tiny_media import picture_bytes, write_video
from tests.helpers.tiny_sounds import sound_bytes, tone

PLACE = RowLocation("rows.jsonl", 1)


@pytest.mark.edge("BR6")
class TestDataUrls:
    """`data:` URLs (RFC 2397), as OpenAI's rows have them."""

    @pytest.fixture(autouse=True)
    def no_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("fetched"))

    def test_are_the_medium(self, tmp_path: Path) -> None:
        data, loader = picture_bytes(picture(24, 16)), MediaLoader(tmp_path)
        data += bytes(1 + -len(data) % 3)  # so that its base64 is padded
        text = base64.b64encode(data).decode()
        lines = "\n".join(text[start : start + 76] for start in range(0, len(text), 76))
        for body in (text, text.rstrip("="), lines, text.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D")):
            for head in ("data:image/png;base64,", "DATA:image/png;name=a.png;base64,", " data:;base64,"):
                assert loader.read(head + body)[0] == data
        url = f"data:image/png;base64,{text}"
        assert loader.read("data:image/png," + urllib.parse.quote_from_bytes(data))[0] == data
        assert loader.load_image({"bytes": url}).size == loader.load_image({"path": url}).size == (24, 16)
        header = loader.probe("image", url)
        assert isinstance(header, ImageHeader) and (header.height, header.width) == (16, 24)

    def test_are_videos_and_sounds_too(self, tmp_path: Path) -> None:
        loader = MediaLoader(tmp_path)
        clip = base64.b64encode(write_video(tmp_path / "a.mp4", [9] * 8).read_bytes()).decode()
        assert loader.load_video(f"data:video/mp4;base64,{clip}").frames.shape[1:] == (32, 48, 3)
        frames = [f"data:image/png;base64,{base64.b64encode(picture_bytes(picture())).decode()}"] * 2
        assert len(loader.load_video(frames).frames) == 2
        sound = base64.b64encode(sound_bytes(tone(0.5, 16000), 16000)).decode()
        assert loader.load_audio(f"data:audio/wav;base64,{sound}").seconds == pytest.approx(0.5)

    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("data:image/png;base64,iVBOR*w0", r"'data:image/png;base64,…' is not base64: .*Encode the file again"),
            ("data:image/png;base64,iVBO1", r"'data:image/png;base64,…' is not base64"),
            ("data:image/png;base64", r"is not a data: URL: it has no comma.*Write data:image/png;base64,"),
            ("data:image/png;base64,", r"'data:image/png;base64,…' is empty \(0 bytes\)"),
            (f"data:image/png;base64,{'A' * 4000}", r"'data:image/png;base64,…' has 30\d\d bytes, more than 2000"),
            (f"data:image/png,{'A' * 4000}", r"'data:image/png,…' has 4000 bytes, more than 2000"),
        ],
    )
    def test_broken_and_large_ones(
        self, tmp_path: Path, url: str, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(media, "MAX_FILE_BYTES", 2000)
        for allow_remote in (False, True):
            with pytest.raises(DataError, match=f"(?s){message}"):
                MediaLoader(tmp_path, limits=MediaLimits(allow_remote=allow_remote)).load_image(url)

    def test_in_rows(self, tmp_path: Path) -> None:
        """Of conversations in OpenAI's form, of captioned media, and of prompts, which name files."""
        data = picture_bytes(picture(24, 16))
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "A dog."}]}
        sample = with_media_beside(convert_row(row, RowFormat(formatting="openai"), PLACE), str(tmp_path))
        assert MediaLoader(tmp_path).load_image(sample.media[0].source).size == (24, 16)
        assert parse_row({"image": url, "text": "a dog"}, PLACE, ColumnNames(), "folder").media == data
        with pytest.raises(DataError, match=r"rows.jsonl:1  image .*is not base64"):
            parse_row({"image": url[:-9] + "*", "text": "a"}, PLACE, ColumnNames())
        (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a dog", "image": url}))
        with pytest.raises(DataError, match=r"prompts of generators name files. Save it as a file"):
            read_prompts(tmp_path / "p.jsonl")


def chunk(kind: bytes, body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")


@pytest.mark.edge("BR14")
class TestPictures:
    @pytest.mark.parametrize("where", ["before", "behind"])
    def test_texts_in_a_png_are_no_part_of_it(self, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Prompts and workflows that other programs write, before the pixels or behind them."""
        monkeypatch.setattr(PngImagePlugin, "MAX_TEXT_MEMORY", 2**20)  # of 64 times as much
        plain, at = picture_bytes(picture()), {"before": 33, "behind": -12}[where]
        packed = chunk(b"zTXt", b"workflow\0\0" + zlib.compress(b"x" * 2**21))
        long = chunk(b"iTXt", b"workflow\0\0\0\0\0" + b"x" * 2**21)
        profile = chunk(b"iCCP", b"profile\0\0" + zlib.compress(b"x" * 2**21))
        for text in (packed, long, profile) if where == "before" else (packed, long):
            data = plain[:at] + text + plain[at:]
            assert np.array_equal(np.asarray(decode_image(data)), np.asarray(picture()))
            assert probe_image(io.BytesIO(data)) == ImageHeader(32, 32, 1, 0.0)

    @pytest.mark.parametrize("kind", ["TIFF", "AVIF", "JPEG2000", "PPM", "MPO"])
    def test_formats(self, kind: str) -> None:
        options: dict[str, Any] = {"quality": 100} if kind in ("AVIF", "MPO") else {}
        if kind == "MPO":
            options |= {"save_all": True, "append_images": [picture()]}
        shown = Image.new("RGB", (32, 32), (200, 30, 60)) if options else picture()
        data = picture_bytes(shown, kind, **options)
        found = np.asarray(decode_image(data)).astype(int)
        assert np.abs(found - np.asarray(shown)).max() <= (6 if options else 0)
        assert probe_image(io.BytesIO(data)) == ImageHeader(32, 32, 1, 0.0)

    def test_of_a_tiff(self) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        turned = picture_bytes(picture(40, 20), "TIFF", exif=exif)
        assert probe_image(io.BytesIO(turned)) == ImageHeader(40, 20, 1, 0.0)
        assert np.array_equal(np.asarray(decode_image(turned)), np.rot90(np.asarray(picture(40, 20)), -1))
        gray = Image.fromarray(np.array([[0, 40000, 65535]], dtype=np.uint16))
        assert list(np.asarray(decode_image(picture_bytes(gray, "TIFF")))[0, :, 0]) == [0, 156, 255]
        with pytest.raises(DataError, match="floating-point numbers, which have no known range"):
            decode_image(picture_bytes(Image.new("F", (4, 4), 0.5), "TIFF"))
        pages = picture_bytes(picture(), "TIFF", save_all=True, append_images=[picture(8, 8)])
        with pytest.warns(UserWarning, match="several pages: the first is used"):
            assert decode_image(pages).size == (32, 32)

    def test_suffixes_are_those_that_pillow_knows(self) -> None:
        Image.init()
        formats = {*IMAGE_FORMATS, "MPO"} - {"PPM"}
        known = {suffix for suffix, kind in Image.registered_extensions().items() if kind in formats}
        assert known | {".ppm", ".pgm", ".pbm", ".pnm"} == IMAGE_SUFFIXES  # not .pfm: floating-point numbers


@pytest.mark.edge("BS14")
def test_pillow_warns_of_nothing_itself() -> None:
    """Of a picture of 90 megapixels, of a palette with transparency, of a camera's file that is malformed."""
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([10, 20, 30] * 2)
    camera = picture_bytes(picture(), "MPO", save_all=True, append_images=[picture()])
    header = b"IHDR" + (9500).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    data = {
        "large": b"\x89PNG\r\n\x1a\n" + chunk(header[:4], header[4:]) + chunk(b"IDAT", zlib.compress(b"")),
        "palette": picture_bytes(palette, transparency=b"\0\xff"),
        "camera": camera.replace(b"MPF\0II", b"MPF\0XX").replace(b"MPF\0MM", b"MPF\0XX"),
    }
    for name, content in data.items():
        with warnings.catch_warnings(record=True) as noted, suppress(DataError):
            warnings.simplefilter("always")
            decode_image(content, name)
        assert not noted, name


@pytest.mark.edge("BR14")
class TestColumnsOfMedia:
    """What tables have where a row has fewer media than others, or none of a kind."""

    @pytest.mark.parametrize(
        "columns",
        [
            {"images": ["a.png", None]},
            {"images": [None, "a.png"]},
            {"images": [], "image": "a.png"},
            {"images": [None], "image": "a.png"},
            {"images": "", "image": ["a.png", ""]},
            {"image": None, "images": ["a.png"], "videos": [None], "audio": []},
        ],
    )
    def test_blanks_are_no_media(self, columns: dict[str, Any]) -> None:
        messages = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A dog."}]
        for row_format in (RowFormat(), RowFormat(images="images")):
            sample = convert_row({"conversations": messages, **columns}, row_format, PLACE)
            assert [item.source for item in sample.media] == ["a.png"]

    def test_a_missing_medium_is_still_missing(self) -> None:
        messages = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A dog."}]
        with pytest.raises(DataError, match=r"images  1 <image> placeholders in the text, but 0 images"):
            convert_row({"conversations": messages, "images": [None]}, RowFormat(), PLACE)
