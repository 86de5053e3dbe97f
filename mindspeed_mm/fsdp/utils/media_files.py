"""Writes pictures and clips that were generated: PNG, and mp4 that every browser plays; whole files or none."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mindspeed_mm.core.artifacts import atomic_write_bytes

SMALL_CLIP_PIXELS = 256 * 256
"""Frames up to this size are kept nearly as they are: their files are small anyway."""
CRF, NEARLY_LOSSLESS_CRF = 17, 4
"""x264's constant rate factors: 0 is lossless, 17 is hardly told from it."""
_BT601, _LIMITED_RANGE = 6, 1
"""Numbers of ITU-T H.273 and of ffmpeg: what decoders assume of a small clip, and told to those that look."""


def write_media(stem: Path, frames: np.ndarray, fps: float) -> Path:
    """Write one frame as `<stem>.png`, several as `<stem>.mp4`; returns the file.

    Args:
        stem: Folder and name without the ending.
        frames: (T, H, W, 3) uint8.
        fps: Frames a second of a clip.
    """
    if len(frames) == 1:
        path = stem.with_name(f"{stem.name}.png")
        write_image(path, frames[0])
    else:
        path = stem.with_name(f"{stem.name}.mp4")
        write_video(path, frames, fps)
    return path


def write_image(path: Path, array: np.ndarray) -> None:
    """Write a PNG.

    Args:
        path: The file.
        array: (H, W, 3) uint8.

    Raises:
        ValueError: The array is of another shape or type.
    """
    atomic_write_bytes(path, image_bytes(array))


def image_bytes(array: np.ndarray) -> bytes:
    """A PNG. Raises `ValueError` as `write_image`."""
    _check(array, 3)
    data = io.BytesIO()
    Image.fromarray(array).save(data, "png")
    return data.getvalue()


def write_video(path: Path, frames: np.ndarray, fps: float, *, crf: int | None = None) -> None:
    """Write an mp4: H.264, 4:2:0, BT.601. An odd height or width grows by one: the last row or column is repeated.

    The same frames give the same bytes, with the same libraries on the same kind of processor.

    Args:
        path: The file.
        frames: (T, H, W, 3) uint8.
        fps: Frames a second.
        crf: x264's constant rate factor; None: nearly lossless for frames of up to 256×256 pixels, 17 above.

    Raises:
        ValueError: The array is of another shape or type, or holds no frame.
    """
    atomic_write_bytes(path, video_bytes(frames, fps, crf=crf))


def video_bytes(frames: np.ndarray, fps: float, *, crf: int | None = None) -> bytes:
    """An mp4, as `write_video` writes it, from the same arguments."""
    _check(frames, 4)
    _, height, width, _ = frames.shape
    if crf is None:
        crf = NEARLY_LOSSLESS_CRF if height * width <= SMALL_CLIP_PIXELS else CRF
    even_frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return _encode(even_frames, fps, crf)


def _encode(frames: np.ndarray, fps: float, crf: int) -> bytes:
    import av  # a quarter of a second, and only clips need it

    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        _, stream.height, stream.width, _ = frames.shape
        stream.pix_fmt = "yuv420p"
        # Bytes depend on the number of threads, and macroblock trees come out differently from one call to the next.
        # The deblocking filter smooths hard edges away (56 of 255 levels in noise), where there is nothing to smooth.
        stream.options = {"crf": str(crf), "preset": "medium", "x264-params": f"mbtree=0:no-deblock={int(crf < CRF)}"}
        stream.codec_context.thread_count = 1
        _describe_colours(stream.codec_context)
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            container.mux(stream.encode(picture.reformat(format="yuv420p", dst_colorspace="ITU601")))
        container.mux(stream.encode())
    return data.getvalue()


def _describe_colours(context: Any) -> None:
    context.color_range = _LIMITED_RANGE
    context.colorspace = context.color_primaries = context.color_trc = _BT601


def _check(array: np.ndarray, dims: int) -> None:
    if array.dtype != np.uint8 or array.ndim != dims or array.shape[-1] != 3 or 0 in array.shape:
        raise ValueError(f"(…, H, W, 3) uint8 with {dims} axes is written, not {array.shape} {array.dtype}")
