"""Sections D to F of the bad-input catalogue: every broken picture, video and sound as a real file in a real data set,
refused by name under the policy `error`, left out and counted under `skip`."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data import build_mm_dataloader, build_mm_dataset
from mindspeed_mm.fsdp.params.data_args import DataloaderParam, DatasetParam
from tests.fsdp.data.conftest import picture, write_jsonl
from tests.helpers.tiny_media import picture_bytes, wav_bytes, write_sound_in_mp4, write_video
from tests.helpers.tiny_processors import save_processor
from tests.helpers.tiny_sounds import cut_wav, sound_bytes, tone, write_container

RATE = 16000
GOOD_ROWS = 40
Make = Callable[[Path], Any]


def content(make: Callable[[], bytes]) -> Make:
    return lambda path: path.write_bytes(make())


def video_content(change: Callable[[bytes], bytes], **video: Any) -> Make:
    def make(path: Path) -> None:
        write_video(path, [0, 255] * 30, **video)
        path.write_bytes(change(path.read_bytes()))

    return make


def huge_header(width: int, height: int) -> bytes:
    data = bytearray(picture_bytes(Image.new("L", (1, 1))))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


def huge_chunk(tag: bytes, head: bytes) -> bytes:
    data = picture_bytes(picture())
    body = tag + head + zlib.compress(b"x" * 100_000_000)
    chunk = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    return data[:33] + chunk + data[33:]


def huge_frames(path: Path) -> None:
    """A video of one frame of 68 megapixels, declared as a small one: only the frame itself tells."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mjpeg", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuvj420p"
        packet = av.Packet(picture_bytes(Image.new("RGB", (9216, 7424)), "JPEG", subsampling=2))
        packet.stream, packet.pts, packet.dts, packet.time_base = stream, 0, 0, Fraction(1, 8)
        container.mux(packet)


def without_frames(data: bytes) -> bytes:
    return data[: data.index(b"\x1f\x43\xb6\x75")]  # a Matroska file up to its first cluster


def blanked(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(60) + data[middle + 60 :]


def sixty_declared(data: bytes) -> bytes:
    """A Matroska file that ends early: nothing but its duration tells."""
    return data[: len(data) // 2]


IMAGES: dict[str, tuple[Make, str]] = {
    "51 html": (content(lambda: b"<html><body>404</body></html>"), r"is not an image \(starts with <html"),
    "51 json": (content(lambda: b'{"error": "not found"}'), r"is not an image \(starts with \{"),
    "52 half a JPEG": (content(lambda: picture_bytes(picture(256, 256), "JPEG")[:8000]), "is broken: .*truncated"),
    "54 90 megapixels": (content(lambda: huge_header(9500, 9500)), "90 megapixels, more than 67"),
    "54 196 megapixels": (content(lambda: huge_header(14000, 14000)), "is too large"),
    "55 aspect": (content(lambda: picture_bytes(picture(1, 10000))), "1 × 10000 pixels is refused"),
    "60 EPS": (content(lambda: picture_bytes(picture(), "EPS")), "format EPS not allowed"),
    "60 PSD": (content(lambda: b"8BPS\x00\x01" + b"\x00" * 40), "format PSD not allowed"),
    "60 HEIF": (content(lambda: b"\0\0\0\x18ftypheic" + bytes(64)), "format HEIF .HEIC. not allowed"),
    "60 JPEG XL": (content(lambda: b"\xff\x0a" + bytes(64)), "format JPEG XL not allowed"),
    "60 SVG": (content(lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>'), "format SVG not allowed"),
}
VIDEOS: dict[str, tuple[Make, str]] = {
    "62 moov missing": (video_content(lambda data: data[: len(data) // 2]), r"is broken or cut: its index \(moov\)"),
    "63 faststart, half": (
        video_content(lambda data: data[: len(data) // 2], faststart=True, codec="mpeg4"),
        r"is cut: \d+ of its 60 frames are there",
    ),
    "63 no index, half": (video_content(sixty_declared, codec="mpeg4"), r"is cut: it ends after \d"),
    "64 corrupt middle": (video_content(blanked, codec="mpeg4"), "is broken: "),
    "65 no video stream": (write_sound_in_mp4, "has no video stream"),
    "66 a picture": (content(lambda: picture_bytes(picture(), "JPEG")), "is not a video but a JPEG picture"),
    "66 a sound": (content(wav_bytes), r"is not a video but sound \(WAV\)"),
    "67 ffconcat": (content(lambda: b"ffconcat version 1.0\nfile good.mp4\n"), r"not a video \(starts with ffconcat"),
    "67 m3u8": (content(lambda: b"#EXTM3U\n#EXTINF:1,\ngood.mp4\n"), r"not a video \(starts with #EXTM3U"),
    "67 mpd": (content(lambda: b'<?xml version="1.0"?><MPD></MPD>'), r"not a video \(starts with <\?xml"),
    "68 no frames": (video_content(without_frames), "is not a video of an allowed container"),
    "69 no frames in a list": (lambda path: None, r"\[\] is not a video"),
    "70 8K frames": (lambda path: huge_frames(path), "9216 × 7424: too large"),
}
AUDIOS: dict[str, tuple[Make, str]] = {
    "72 header cut": (content(lambda: sound_bytes(tone(0.1, RATE), RATE)[:20]), "is broken or cut"),
    "72 half its data": (content(cut_wav), r"is cut: 0\.50 s of the declared 1\.00 s"),
    "73 no samples": (content(lambda: sound_bytes(np.zeros((0, 1)), RATE)), "has no samples"),
    "73 NaN": (content(lambda: sound_bytes(np.full((99, 1), np.nan), RATE, subtype="FLOAT")), "are not numbers"),
    "75 longer than the window": (
        content(lambda: sound_bytes(tone(2.5, RATE), RATE)),
        r"is 2\.5 s long; the model takes 2\.0 s",
    ),
    "html": (content(lambda: b"<html>404</html>"), r"is not a sound \(starts with <html"),
}
SUFFIX = {"images": "png", "videos": "mp4", "audios": "wav"}
MATROSKA = ("63 no index, half", "68 no frames")
CASES = {
    **{name: ("images", *case) for name, case in IMAGES.items()},
    **{name: ("videos", *case) for name, case in VIDEOS.items()},
    **{name: ("audios", *case) for name, case in AUDIOS.items()},
    "76 no sound": ("videos", lambda path: write_video(path, [0] * 8), "has no sound"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All broken files, a row each, and good rows behind them."""
    folder = tmp_path_factory.mktemp("catalogue")
    (folder / "model").mkdir()
    save_processor("qwen2_5_omni", folder / "model")
    write_video(folder / "good.mp4", [0] * 8)
    rows = []
    for number, (name, (column, make, _)) in enumerate(CASES.items()):
        path = folder / f"{number}.{'avi' if '8K' in name else 'mkv' if name in MATROSKA else SUFFIX[column]}"
        make(path)
        source: Any = [] if "list" in name else path.rename(path.with_suffix(f".{SUFFIX[column]}")).name
        rows.append(_row(f"<{column[:-1]}>What is it?", **{column: [source]}))
    rows += [_row("What comes after nine?") for _ in range(GOOD_ROWS)]
    write_jsonl(folder / "rows.jsonl", rows)
    return folder


def _row(question: str, **media: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": "ten"}
    return {"messages": [{"role": "user", "content": question}, answer], **media}


def data_set(folder: Path, *, hears: bool = False, **basic: Any) -> Any:
    param = {
        "basic_parameters": {"dataset": "rows.jsonl", "dataset_dir": str(folder), "cutoff_len": 32768, **basic},
        "preprocess_parameters": {"model_name_or_path": str(folder / "model"), "use_audio_in_video": hears},
    }
    return build_mm_dataset(DatasetParam.model_validate(param))[0]


def loader(dataset: Any, **changes: Any) -> Any:
    param = DataloaderParam.model_validate({"num_workers": 0, "shuffle": False, **changes})
    return build_mm_dataloader(
        dataset, param, micro_batch_size=2, gradient_accumulation_steps=1, dp_rank=0, dp_size=1, seed=3
    )


@pytest.fixture(scope="module")
def strict(folder: Path) -> Any:
    return {hears: data_set(folder, hears=hears) for hears in (False, True)}


@pytest.fixture(scope="module")
def skipped(folder: Path) -> dict[str, str]:
    """What the loader counts as bad over one epoch under the policy `skip`: sample → reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = loader(data_set(folder, hears=True, on_bad_sample="skip", max_bad_fraction=1.0))
        batches = iter(data)
        for _ in range((len(CASES) + GOOD_ROWS) // 2):
            for batch in next(batches):
                assert len(batch["sample_ids"]) == 2  # batches keep their size
    return dict(data.counts.bad)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("case", CASES)
def test_refused_by_name_under_the_policy_error(strict: Any, case: str) -> None:
    column, _, reason = CASES[case]
    number = list(CASES).index(case)
    with pytest.raises(DataError, match=f"(?s){reason}") as caught:
        strict[case.startswith("76")][number]
    problem = caught.value.problems[0]
    assert problem.where.endswith(f"rows.jsonl:{number + 1}")
    assert problem.key.startswith(column)
    assert f"'{number}.{SUFFIX[column]}'" in problem.what or "aspect" in case or "list" in case
    assert problem.way_out


@pytest.mark.parametrize("case", CASES)
def test_left_out_and_counted_under_the_policy_skip(skipped: dict[str, str], case: str) -> None:
    number = list(CASES).index(case)
    found = [reason for sample, reason in skipped.items() if sample.endswith(f"rows.jsonl:{number + 1}")]
    assert len(found) == 1
    assert "rows.jsonl" in found[0]


def test_nothing_else_was_left_out(skipped: dict[str, str]) -> None:
    assert len(skipped) == len(CASES)


def test_the_loader_stops_at_the_first_under_the_policy_error(folder: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1 .*images.*starts with <html"):
        next(iter(loader(data_set(folder))))


def test_too_many_are_an_error(folder: Path) -> None:
    bad = math.ceil(0.01 * (len(CASES) + GOOD_ROWS)) + 1
    data = loader(data_set(folder, on_bad_sample="skip", max_bad_fraction=0.01))
    with pytest.raises(DataError, match=rf"{bad} of \d+ samples are bad, more than 1.000%"):
        list(data)


# --- what is taken, by a stated rule ---------------------------------------------------------------------------------


def _taken(folder: Path, tmp_path: Path, name: str, make: Make, column: str) -> Any:
    (tmp_path / "model").symlink_to(folder / "model")
    make(tmp_path / name)
    write_jsonl(tmp_path / "rows.jsonl", [_row(f"<{column[:-1]}>What is it?", **{column: [name]})])
    return data_set(tmp_path)[0]["media"][0]


def _exif_6() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return picture_bytes(picture(48, 32), "JPEG", exif=exif)


TAKEN: dict[str, tuple[str, Make, str]] = {
    "53 flipped bit": ("images", content(lambda: _flipped(picture_bytes(picture(64, 64), "JPEG"))), "a.jpg"),
    "55 one pixel": ("images", content(lambda: picture_bytes(picture(1, 1))), "a.png"),
    "56 CMYK": ("images", content(lambda: picture_bytes(Image.new("CMYK", (32, 32)), "JPEG")), "a.jpg"),
    "56 palette": ("images", content(lambda: picture_bytes(Image.new("P", (32, 32)))), "a.png"),
    "56 alpha": ("images", content(lambda: picture_bytes(Image.new("RGBA", (32, 32)))), "a.png"),
    "57 16-bit gray": (
        "images",
        content(lambda: picture_bytes(Image.fromarray(np.full((32, 32), 40000, np.uint16)))),
        "a.png",
    ),
    "58 turned": ("images", content(_exif_6), "a.jpg"),
    "60 TIFF": ("images", content(lambda: picture_bytes(picture(), "TIFF")), "a.tif"),
    "61 text": ("images", content(lambda: huge_chunk(b"zTXt", b"key\x00\x00")), "a.png"),
    "61 ICC profile": ("images", content(lambda: huge_chunk(b"iCCP", b"profile\x00\x00")), "a.png"),
    "68 varying rate": (
        "videos",
        lambda path: write_video(path, [0, 9, 99, 199], fps=10, times=[0, 1, 2, 8]),
        "a.mkv",
    ),
    "69 one frame": ("videos", lambda path: write_video(path, [9]), "a.mp4"),
    "70 many frames": ("videos", lambda path: write_video(path, [9] * 3000, fps=1, height=16, width=16), "a.mp4"),
    "71 odd sizes": ("videos", lambda path: write_video(path, [9] * 8, codec="mpeg4", height=33, width=47), "a.avi"),
    "71 turned": ("videos", lambda path: write_video(path, [9] * 8, rotation=90), "a.mp4"),
    "74 8 kHz": ("audios", content(lambda: sound_bytes(tone(0.5, 8000), 8000)), "a.wav"),
    "74 192 kHz, 6 channels, 24 bit": (
        "audios",
        content(lambda: sound_bytes(tone(0.5, 192000, channels=6), 192000, subtype="PCM_24")),
        "a.wav",
    ),
    "74 in a container": ("audios", lambda path: write_container(path, tone(0.5, 44100), 44100), "a.m4a"),
}


def _flipped(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("case", TAKEN)
def test_taken(folder: Path, tmp_path: Path, case: str) -> None:
    column, make, name = TAKEN[case]
    made = _taken(folder, tmp_path, name, make, column)
    assert made.kind == column[:-1] and len(made.token_ids)
    if case == "58 turned":
        assert made.tensors["grid_thw"] == (1, 6, 4)  # upright: 32 wide, 48 high, in patches of 8
    if case == "69 one frame":
        assert made.tensors["grid_thw"][0] == 1  # repeated to fill a patch of two
    if case == "70 many frames":
        assert made.tensors["grid_thw"][0] == 64  # 128 frames of 3,000 seconds
    if case.startswith("74 192"):
        assert made.tensors["feature_attention_mask"].sum() == 50  # half a second, a hundred frames a second


@pytest.mark.parametrize(
    ("make", "column", "name", "words"),
    [
        (lambda path: _animation(path), "images", "a.gif", "several frames: the first is used"),
        (content(lambda: sound_bytes(np.zeros((8000, 1)), RATE)), "audios", "a.wav", "are silent"),
    ],
    ids=["59 several frames", "73 silence"],
)
def test_taken_with_a_warning(folder: Path, tmp_path: Path, make: Make, column: str, name: str, words: str) -> None:
    with pytest.warns(UserWarning, match=words):
        _taken(folder, tmp_path, name, make, column)


def _animation(path: Path) -> None:
    frames = [Image.new("RGB", (32, 32), color) for color in ("red", "blue")]
    frames[0].save(path, save_all=True, append_images=frames[1:])
