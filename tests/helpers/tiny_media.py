"""Pictures and clips small enough for tests, right ones and broken ones."""

from __future__ import annotations

import io
import wave
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image


def write_video(
    path: Path,
    grays: Sequence[int],
    *,
    fps: int = 16,
    height: int = 32,
    width: int = 48,
    codec: str = "libx264",
    rotation: int = 0,
    times: Sequence[int] | None = None,
    faststart: bool = False,
) -> Path:
    """A clip whose frame k is gray of brightness `grays[k]`, its upper half darker; `times` are in frames of `fps`."""
    options = {"movflags": "faststart"} if faststart else {}
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.gop_size = 4
        if rotation:
            stream.set_display_rotation(rotation)
        for number, gray in enumerate(grays):
            pixels = np.full((height, width, 3), gray, np.uint8)
            pixels[: height // 2] //= 2
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_sound_in_mp4(path: Path) -> Path:
    """An mp4 without a video stream."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 8000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def brightness(clip_CTHW: Any) -> list[int]:
    """Of the lower half of each frame of a clip from `write_video`."""
    return [int(value) for value in np.asarray(clip_CTHW)[0, :, -4, 4]]


def picture_bytes(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """A picture as a file of a kind."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def wav_bytes() -> bytes:
    """A tenth of a second of silence."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(bytes(1600))
    return buffer.getvalue()
