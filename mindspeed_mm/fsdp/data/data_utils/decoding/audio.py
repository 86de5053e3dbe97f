"""The door to sound: sound files by soundfile, containers and the sound of videos by PyAV; one mono track comes out, or
a stretch of as many channels as a generator learns.

The rule: channels are averaged; then the track is resampled by FFmpeg's swresample to the rate that is asked for, to
ceil(samples · to / from) samples. A file is read in blocks, so memory is that of the result. What is white-listed for
videos is for containers of sound too: no format that names other files, no protocol but local files.
"""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import readable_start
from mindspeed_mm.fsdp.utils.model_parts import setting_of

OPEN_OPTIONS = {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,aac",
    "protocol_whitelist": "file",
}
SOUND_FORMATS = frozenset({"WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3", "AIFF"})
"""What soundfile may read, by content and whatever the file is called."""
MAX_SECONDS = 3600.0
LEAST_COMPLETE = 0.95
"""Share of the declared length that must be there."""

_BLOCK_SAMPLES = 65536
_IN_TIME_S = 0.02
"""Sound and pictures that begin so little apart begin together: coders put some samples in front."""
_LEAST_OF_STRETCH = 0.9
"""Share of a stretch of sound that must be there."""
_SLACK_S = 0.1
"""Coders add and drop some hundredths of a second at both ends."""
_REPLACE = "Replace the file or drop the row."
_SNIFFED_BYTES = 64
_SOUND_STARTS = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"ID3", b"FORM", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")
_KNOWN_STARTS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "is a Git LFS pointer: run `git lfs pull`"),
    (b"\xff\xd8\xff", "is not a sound but a JPEG picture"),
    (b"\x89PNG", "is not a sound but a PNG picture"),
    (b"GIF8", "is not a sound but a GIF picture"),
)


@dataclass(frozen=True, slots=True)
class AudioClip:
    """One mono track of decoded sound, with its sampling rate."""

    samples: np.ndarray
    """(N,) float32."""
    rate: int
    """Samples a second."""
    name: str = "audio"
    """What to call it in messages."""

    @property
    def seconds(self) -> float:
        """Length of the track in seconds."""
        return len(self.samples) / self.rate


@dataclass(frozen=True, slots=True)
class AudioHeader:
    """What a sound file says of itself, as it will be resampled."""

    samples: int
    rate: int
    is_exact: bool
    """Whether decoding gives just so many samples; containers and lossy formats declare them roughly."""

    @property
    def seconds(self) -> float:
        """Length in seconds, computed from samples and rate."""
        return self.samples / self.rate


@dataclass(slots=True)
class _Track:
    """A file opened for reading: how it is declared, and its blocks."""

    rate: int
    declared: int | None
    """Samples; None where the file does not say."""
    is_exact: bool
    blocks: Iterator[np.ndarray]
    """(samples, channels) each."""
    first_s: float = 0.0
    """When it begins, by the file's clock."""


def probe_audio(file: BinaryIO, rate: int, name: str = "audio") -> AudioHeader:
    """Read a sound's header.

    Args:
        file: Opened for reading.
        rate: To which it will be resampled.
        name: What to call it in messages.

    Raises:
        DataError: As `read_audio`, as far as the header tells.
    """
    with _opened(file, name) as track:
        if track.declared is None:
            return AudioHeader(0, rate, is_exact=False)
        _check_length(track.declared / track.rate, name)
        return AudioHeader(_resampled_length(track.declared, track.rate, rate), rate, track.is_exact)


def read_audio(file: BinaryIO, rate: int, name: str = "audio") -> AudioClip:
    """Decode a sound file, or the sound of a video, to one track.

    Args:
        file: Opened for reading.
        rate: Samples a second to give.
        name: What to call it in messages.

    Raises:
        DataError: The file is not audio of an allowed format, is cut short, broken, empty or too long, or holds
            numbers that are not finite.
    """
    with _opened(file, name) as track:
        if track.declared is not None:
            _check_length(track.declared / track.rate, name)
        pieces, found = _decoded_track(track, rate, 1, name)
    _check_track_complete(found, track, name)
    samples = pieces.joined(_resampled_length(found, track.rate, rate))[0]
    if not samples.any():
        warnings.warn(f"'{name}' and perhaps others are silent: all samples are zero", stacklevel=2)
    return AudioClip(samples, rate, name)


def read_stretch(
    file: BinaryIO,
    rate: int,
    channels: int,
    start_s: float,
    count: int,
    name: str = "audio",
    *,
    clock_s: float | None = None,
) -> np.ndarray:
    """A stretch of a sound file, or of the sound of a video: (channels, count) float32. What it lacks before it begins,
    and what little it lacks at the end, is silence.

    Args:
        file: Opened for reading.
        rate: Samples a second to give.
        channels: How many to give, 1 or 2. A track of one channel stands in both; one of more than are asked for is
            averaged first.
        start_s: Where the stretch begins.
        count: Samples.
        name: What to call it in messages.
        clock_s: Where `start_s` counts from, by the file's clock; None: from where the sound begins.

    Raises:
        DataError: As `read_audio`; or the sound ends before a tenth of a second, or of the stretch, is left.
    """
    with _opened(file, name) as track:
        if clock_s is not None and abs(clock_s - track.first_s) > _IN_TIME_S:
            start_s += clock_s - track.first_s
        first = round(start_s * rate)
        pieces, found = _decoded_track(track, rate, channels, name, until_s=(first + count) / rate + _SLACK_S)
    stretch = pieces.joined(_resampled_length(found, track.rate, rate))[:, max(0, first) : max(0, first + count)]
    stretch = np.pad(stretch, ((0, 0), (min(count, max(0, -first)), 0)))  # it has not begun yet
    missing = count - stretch.shape[1]
    if missing > max(_SLACK_S * rate, (1 - _LEAST_OF_STRETCH) * count):
        raise DataError(
            f"the sound of '{name}' ends after {found / track.rate:.2f} s of {(first + count) / rate:.2f} s asked for",
            way_out="Drop the row, or take fewer frames.",
        )
    return np.pad(stretch, ((0, 0), (0, missing)))


def _decoded_track(
    track: _Track, rate: int, channels: int, name: str, until_s: float = math.inf
) -> tuple[_Resampler, int]:
    """A track as far as it is needed, and how many of its samples that were. Raises `DataError` as `read_audio`."""
    pieces, found = _Resampler(track.rate, rate, channels), 0
    for block in track.blocks:
        if not np.isfinite(block).all():
            raise DataError(f"'{name}' has samples that are not numbers (NaN or infinite)", way_out=_REPLACE)
        found += len(block)
        _check_length(found / track.rate, name)
        pieces.add(_mixed(block, channels))
        if found / track.rate >= until_s:
            break
    return pieces, found


def _mixed(block: np.ndarray, channels: int) -> np.ndarray:
    """(samples, any) → (channels, samples)."""
    if block.shape[1] != channels:
        block = np.repeat(block.mean(axis=1, dtype=np.float32)[:, None], channels, axis=1)
    return np.ascontiguousarray(block.T)


class _Resampler:
    """Blocks of one rate, (channels, samples), → one track of another."""

    def __init__(self, source_rate: int, rate: int, channels: int) -> None:
        import av  # here and not above: importing a data set of language should not load FFmpeg

        self._frame = av.AudioFrame
        self._layout, self._channels = {1: "mono", 2: "stereo"}[channels], channels
        is_same = rate == source_rate
        self._resampler = None if is_same else av.AudioResampler(format="fltp", layout=self._layout, rate=rate)
        self._source_rate = source_rate
        self._pieces: list[np.ndarray] = []

    def add(self, block: np.ndarray) -> None:
        """Resample a block, (channels, samples), and keep the result until `joined` is called."""
        if self._resampler is None:
            self._pieces.append(block)
            return
        frame = self._frame.from_ndarray(block, format="fltp", layout=self._layout)
        frame.sample_rate = self._source_rate
        self._take(frame)

    def joined(self, length: int) -> np.ndarray:
        """The whole track; what the filter still holds comes last, and zeros where it gives a few samples less."""
        if self._resampler is not None and self._pieces:
            self._take(None)
        track = np.concatenate([np.zeros((self._channels, 0), np.float32), *self._pieces], axis=1)[:, :length]
        return np.pad(track, ((0, 0), (0, length - track.shape[1])))

    def _take(self, frame: object) -> None:
        assert self._resampler is not None
        self._pieces += [made.to_ndarray() for made in self._resampler.resample(frame)]


def _resampled_length(samples: int, source_rate: int, rate: int) -> int:
    return -(-samples * rate // source_rate)


def _check_length(seconds: float, name: str) -> None:
    if seconds > MAX_SECONDS:
        raise DataError(
            f"'{name}' is at least {seconds:.0f} s long, more than {MAX_SECONDS:.0f} s", way_out="Cut it into pieces."
        )


def _check_track_complete(found: int, track: _Track, name: str) -> None:
    if found == 0:
        raise DataError(f"'{name}' has no samples", way_out=_REPLACE)
    if track.declared is not None and found < LEAST_COMPLETE * track.declared - _SLACK_S * track.rate:
        there_s, declared_s = found / track.rate, track.declared / track.rate
        raise DataError(
            f"'{name}' is cut: {there_s:.2f} s of the declared {declared_s:.2f} s are there", way_out=_REPLACE
        )


# --- opening ---------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(file: BinaryIO, name: str) -> Iterator[_Track]:
    start = file.read(_SNIFFED_BYTES)
    size = file.seek(0, 2)
    file.seek(0)
    for known, reason in _KNOWN_STARTS:
        if start.startswith(known):
            raise DataError(f"'{name}' {reason}", way_out=_REPLACE)
    is_avi = start.startswith(b"RIFF") and start[8:12] == b"AVI "
    with (
        _sound_file(file, start, size, name)
        if start.startswith(_SOUND_STARTS) and not is_avi
        else _container(file, start, name) as track
    ):
        yield track


@contextmanager
def _sound_file(file: BinaryIO, start: bytes, size: int, name: str) -> Iterator[_Track]:
    import soundfile  # as above

    declared = _declared_by_wav(file, size)
    file.seek(0)
    try:
        sound = soundfile.SoundFile(file)
    except soundfile.SoundFileError as error:
        raise DataError(f"'{name}' {_why_unreadable(start, error)}", way_out=_REPLACE) from error
    with sound:
        if sound.format not in SOUND_FORMATS:
            raise DataError(f"'{name}': format {sound.format} not allowed", way_out="Write it as WAV or FLAC.")
        is_exact = sound.format not in ("OGG", "MP3")
        yield _Track(sound.samplerate, max(declared, sound.frames), is_exact, _sound_blocks(sound, name))


def _sound_blocks(sound: Any, name: str) -> Iterator[np.ndarray]:
    import soundfile

    try:
        while len(block := sound.read(_BLOCK_SAMPLES, dtype="float32", always_2d=True)):
            yield block
    except soundfile.SoundFileError as error:
        raise DataError(f"'{name}' is broken or cut: {error}", way_out=_REPLACE) from error


def _declared_by_wav(file: BinaryIO, size: int) -> int:
    """Samples that a WAV file's header declares, for soundfile tells only those that are there; 0 where it does not
    say, as recorders that do not know how long they will run."""
    if file.read(4) != b"RIFF":
        return 0
    file.seek(12)
    block_align = 0
    while len(header := file.read(8)) == 8:
        tag, length = header[:4], struct.unpack("<I", header[4:])[0]
        if tag == b"fmt ":
            block_align = struct.unpack("<H", file.read(16)[12:14].ljust(2, b"\0"))[0]
            file.seek(length - 16, 1)
        elif tag == b"data":
            is_known = block_align and 0 < length < 0xFFFF0000 and file.tell() < size
            if is_known:
                return length // block_align
            return 0
        else:
            file.seek(length + length % 2, 1)
    return 0


@contextmanager
def _container(file: BinaryIO, start: bytes, name: str) -> Iterator[_Track]:
    import av

    try:
        container = av.open(file, options=OPEN_OPTIONS, metadata_errors="ignore")
    except (av.FFmpegError, EOFError) as error:
        raise DataError(f"'{name}' {_why_unreadable(start, error)}", way_out=_REPLACE) from error
    with container:
        if not container.streams.audio:
            raise DataError(
                f"'{name}' has no sound", way_out="Drop the row, or leave out the sound: use_audio_in_video: false."
            )
        stream = container.streams.audio[0]
        rate = int(stream.rate or 0)
        if rate <= 0:
            raise DataError(f"'{name}' has no sample rate", way_out=_REPLACE)
        declared, blocks = _declared_by_stream(container, stream, rate), _stream_blocks(container, stream, name)
        yield _Track(rate, declared, False, blocks, float((stream.start_time or 0) * (stream.time_base or 0)))


def _declared_by_stream(container: Any, stream: Any, rate: int) -> int | None:
    if stream.duration is not None and stream.duration > 0:
        return math.floor(stream.duration * stream.time_base * rate)
    # The container's length is that of its longest stream.
    if len(container.streams) > 1 or not container.duration:
        return None
    return math.floor(container.duration / 1e6 * rate)


def _stream_blocks(container: Any, stream: Any, name: str) -> Iterator[np.ndarray]:
    import av

    to_floats = av.AudioResampler(format="fltp", layout=stream.layout, rate=stream.rate)
    try:
        for frame in container.decode(stream):
            if frame.is_corrupt:
                raise DataError(f"'{name}' is broken: a piece of its sound is damaged", way_out=_REPLACE)
            for made in to_floats.resample(frame):
                yield made.to_ndarray().T
    except (av.FFmpegError, EOFError, ValueError) as error:
        raise DataError(f"the sound of '{name}' is broken: {error}", way_out=_REPLACE) from error


def _why_unreadable(start: bytes, error: Exception) -> str:
    reason = setting_of(error, str, "strerror") or str(error)
    if start[4:8] == b"ftyp" or start.startswith(_SOUND_STARTS):
        return f"is broken or cut ({reason})"
    words = readable_start(start)
    if words:
        return f"is not a sound (starts with {words})"
    return f"is not a sound of an allowed format ({reason})"
