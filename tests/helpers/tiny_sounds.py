"""Sounds small enough for tests, right ones and broken ones, and videos with sound."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import av
import numpy as np
import soundfile


def tone(seconds: float, rate: int, hertz: float = 440.0, channels: int = 1) -> np.ndarray:
    """(N, channels) of a sine; channel k is k + 1 times as loud as the first."""
    wave = np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)
    return 0.1 * wave[:, None] * np.arange(1, channels + 1)


def sound_bytes(samples: np.ndarray, rate: int, kind: str = "WAV", subtype: str | None = None) -> bytes:
    """A sound as a file of a kind."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def cut_wav(seconds: float = 1.0, share: float = 0.5, rate: int = 16000) -> bytes:
    """A WAV file whose header declares more than there is."""
    data = sound_bytes(tone(seconds, rate), rate)
    return data[: int(len(data) * share)]


def endless_wav(samples: np.ndarray, rate: int) -> bytes:
    """A WAV file of a recorder that did not know how long it would run."""
    data = bytearray(sound_bytes(samples, rate))
    at = data.index(b"data")
    data[4:8] = data[at + 4 : at + 8] = struct.pack("<I", 0xFFFFFFFF)
    return bytes(data)


def write_container(
    path: Path, samples: np.ndarray, rate: int, *, frames: int = 0, fps: int = 8, size: int = 32, codec: str = "aac"
) -> Path:
    """Sound in an mp4, m4a, mkv or webm, with `frames` gray pictures beside it, each a little brighter."""
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[samples.shape[1]]
    with av.open(str(path), "w") as container:
        if frames:
            video = container.add_stream("libx264", rate=fps)
            video.width = video.height = size
            video.pix_fmt = "yuv420p"
        audio = container.add_stream(codec, rate=rate, layout=layout)
        for number in range(frames):
            picture = av.VideoFrame.from_ndarray(np.full((size, size, 3), 12 * number, np.uint8), format="rgb24")
            container.mux(video.encode(picture))
        if frames:
            container.mux(video.encode())
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(samples.T, dtype=np.float32), format="fltp", layout=layout
        )
        frame.sample_rate, frame.pts = rate, 0
        container.mux(audio.encode(frame))
        container.mux(audio.encode())
    return path
