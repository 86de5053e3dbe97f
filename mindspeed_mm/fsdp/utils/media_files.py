"""Writes pictures, clips and sound that were generated: PNG, mp4 that every browser plays, WAV; whole files or none."""

from __future__ import annotations

import io
import wave
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from mindspeed_mm.core.artifacts import atomic_write_bytes

SMALL_CLIP_PIXELS = 256 * 256
"""Frames up to this size are kept nearly as they are: their files are small anyway."""
CRF, NEARLY_LOSSLESS_CRF = 17, 4
"""x264's constant rate factors: 0 is lossless, 17 is hardly told from it."""
GIF_SIDE, GIF_FRAMES = 320, 48
_LEAST_GIF_MS = 20
"""Browsers show what is faster at a tenth of a second a frame."""
_SOUND_BITS_PER_S = 192_000
_BT601, _LIMITED_RANGE = 6, 1
"""Numbers of ITU-T H.273 and of ffmpeg: what decoders assume of a small clip, and told to those that look."""


@dataclass(frozen=True)
class SoundTrack:
    """Holds generated sound: the samples of each channel and their rate."""

    samples: np.ndarray
    """(channels, N) float32 in -1..1, one channel or two."""
    rate: int
    """Samples a second."""


def write_media(stem: Path, frames: np.ndarray, fps: float, sound: SoundTrack | None = None) -> Path:
    """Write one frame as `<stem>.png`, several as `<stem>.mp4`, with their sound, which `<stem>.wav` has too, as it is;
    returns the first file.

    Args:
        stem: Folder and name without the ending.
        frames: (T, H, W, 3) uint8.
        fps: Frames a second of a clip.
        sound: Of a clip.
    """
    if sound is not None:
        atomic_write_bytes(stem.with_name(f"{stem.name}.wav"), wave_bytes(sound))
    if len(frames) == 1:
        path = stem.with_name(f"{stem.name}.png")
        write_image(path, frames[0])
    else:
        path = stem.with_name(f"{stem.name}.mp4")
        atomic_write_bytes(path, video_bytes(frames, fps, sound=sound))
    return path


def wave_bytes(sound: SoundTrack) -> bytes:
    """A WAV file of 16 bits."""
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(len(sound.samples))
        file.setsampwidth(2)
        file.setframerate(sound.rate)
        file.writeframes(np.ascontiguousarray(_sixteen_bits(sound).T).astype("<i2").tobytes())
    return data.getvalue()


SoundKind = Literal["wav", "pcm", "flac", "mp3", "opus", "aac"]
_CODECS = {"flac": ("flac", "flac"), "mp3": ("mp3", "libmp3lame"), "opus": ("ogg", "libopus"), "aac": ("adts", "aac")}
"""Kind → container and encoder of FFmpeg."""


def sound_bytes(sound: SoundTrack, kind: SoundKind) -> bytes:
    """A sound file: WAV or the bare samples (`pcm`) of 16 bits, little end first; or as FFmpeg encodes it.

    Raises:
        ValueError: The installed FFmpeg lacks the encoder, or the encoder takes no sound of this rate.
    """
    if kind == "wav":
        return wave_bytes(sound)
    if kind == "pcm":
        return np.ascontiguousarray(_sixteen_bits(sound).T).astype("<i2").tobytes()
    import av  # as below

    container_name, encoder = _CODECS[kind]
    if encoder not in av.codecs_available:
        raise ValueError(f"the installed FFmpeg has no encoder '{encoder}'")
    data = io.BytesIO()
    try:
        with av.open(data, "w", format=container_name) as container:
            stream = container.add_stream(encoder, rate=sound.rate)
            stream.layout = _layout(sound)
            _encode_sound(container, stream, sound)
    except av.error.FFmpegError as error:
        raise ValueError(f"'{encoder}' does not take {sound.rate} samples a second: {error}") from error
    return data.getvalue()


def _sixteen_bits(sound: SoundTrack) -> np.ndarray:
    return (sound.samples.clip(-1, 1) * 32767).round().astype(np.int16)


def write_image(path: Path, array: np.ndarray) -> None:
    """Write a PNG.

    Args:
        path: The file.
        array: (H, W, 3) uint8.

    Raises:
        ValueError: The array is of another shape or type.
    """
    atomic_write_bytes(path, image_bytes(array))


LOSSY_QUALITY = 95


def image_bytes(array: np.ndarray, kind: str = "png") -> bytes:
    """A picture: `png`, or with losses `jpeg` or `webp`. Raises `ValueError` as `write_image`."""
    _check(array, 3)
    data = io.BytesIO()
    Image.fromarray(array).save(data, kind, **({} if kind == "png" else {"quality": LOSSY_QUALITY}))
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


def video_bytes(frames: np.ndarray, fps: float, *, crf: int | None = None, sound: SoundTrack | None = None) -> bytes:
    """An mp4, as `write_video` writes it, from the same arguments; its sound is AAC."""
    _check(frames, 4)
    _, height, width, _ = frames.shape
    if crf is None:
        crf = NEARLY_LOSSLESS_CRF if height * width <= SMALL_CLIP_PIXELS else CRF
    even_frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return _encode(even_frames, fps, crf, sound)


def _encode(frames: np.ndarray, fps: float, crf: int, sound: SoundTrack | None) -> bytes:
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
        stream.codec_context.color_range = _LIMITED_RANGE
        stream.codec_context.colorspace = stream.codec_context.color_primaries = stream.codec_context.color_trc = _BT601
        track = None if sound is None else _sound_stream(container, sound)
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            container.mux(stream.encode(picture.reformat(format="yuv420p", dst_colorspace="ITU601")))
        container.mux(stream.encode())
        if sound is not None:
            _encode_sound(container, track, sound)
    return data.getvalue()


def clip_gif(path: Path) -> tuple[bytes, int, int]:
    """A small animated GIF of an mp4, for places that play no clips: the bytes, width and height.

    At most `GIF_FRAMES` frames, evenly spread over the clip and shown as long as the clip is, within `GIF_SIDE` pixels.

    Args:
        path: The clip.
    """
    import av  # as above

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        shown = [frame.to_image() for frame in container.decode(stream)]
        seconds = len(shown) / float(stream.average_rate)
    pictures = shown[:: -(-len(shown) // GIF_FRAMES)]
    for picture in pictures:
        picture.thumbnail((GIF_SIDE, GIF_SIDE))
    data = io.BytesIO()
    each_ms = max(_LEAST_GIF_MS, round(1000 * seconds / len(pictures)))
    pictures[0].save(data, "gif", save_all=True, append_images=pictures[1:], duration=each_ms, loop=0)
    return data.getvalue(), *pictures[0].size


def _sound_stream(container: Any, sound: SoundTrack) -> object:
    """Both streams of a container are added before the first picture of one is written."""
    stream = container.add_stream("aac", rate=sound.rate)
    stream.layout = _layout(sound)
    stream.bit_rate = _SOUND_BITS_PER_S
    return stream


def _encode_sound(container: Any, stream: Any, sound: SoundTrack) -> None:
    import av  # as above

    frame = av.AudioFrame.from_ndarray(_sixteen_bits(sound), format="s16p", layout=_layout(sound))
    frame.sample_rate = sound.rate
    container.mux(stream.encode(frame))
    container.mux(stream.encode())


def _layout(sound: SoundTrack) -> str:
    return {1: "mono", 2: "stereo"}[len(sound.samples)]


def _check(array: np.ndarray, dims: int) -> None:
    if array.dtype != np.uint8 or array.ndim != dims or array.shape[-1] != 3 or 0 in array.shape:
        raise ValueError(f"(…, H, W, 3) uint8 with {dims} axes is written, not {array.shape} {array.dtype}")
