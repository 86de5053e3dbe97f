"""The door to sound: lengths and values against formulas, channels, rates and containers; section F as files."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.decoding import audio
from mindspeed_mm.fsdp.data.data_utils.decoding.audio import AudioClip, AudioHeader, probe_audio, read_audio
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from tests.helpers.tiny_media import picture_bytes, write_video
from tests.helpers.tiny_sounds import cut_wav, endless_wav, sound_bytes, tone, write_container

RATE = 16000


def heard(data: bytes, rate: int = RATE) -> AudioClip:
    return read_audio(io.BytesIO(data), rate, "x.wav")


def probed(data: bytes, rate: int = RATE) -> AudioHeader:
    return probe_audio(io.BytesIO(data), rate, "x.wav")


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT"])
def test_what_needs_no_resampling_is_as_it_was(subtype: str) -> None:
    wave = tone(0.5, RATE)
    made = heard(sound_bytes(wave, RATE, subtype=subtype))
    assert made.rate == RATE and made.seconds == 0.5 and made.samples.dtype == np.float32
    assert np.abs(made.samples - wave[:, 0]).max() < 2**-15


@pytest.mark.parametrize("source_rate", [8000, 11025, 44100, 48000, 192000])
@pytest.mark.parametrize("seconds", [0.75, 0.7503])
def test_other_rates_are_resampled(source_rate: int, seconds: float) -> None:
    """A sine stays that sine, in phase, but for the ends, where a filter has only one side."""
    wave = tone(seconds, source_rate)
    made = heard(sound_bytes(wave, source_rate, subtype="FLOAT"))
    assert len(made.samples) == -(-len(wave) * RATE // source_rate)
    expected = 0.1 * np.sin(2 * np.pi * 440 * np.arange(len(made.samples)) / RATE)
    middle = slice(300, -300)
    assert np.abs(made.samples - expected)[middle].max() < 1e-4
    assert np.abs(made.samples[1:] - expected[:-1])[middle].max() > 1e-2  # a sample late would show


def test_channels_are_averaged() -> None:
    wave = tone(0.3, RATE, channels=6)
    made = heard(sound_bytes(wave, RATE, subtype="FLOAT"))
    assert np.abs(made.samples - wave.mean(axis=1)).max() < 1e-6


@pytest.mark.parametrize(("kind", "error"), [("FLAC", 1e-4), ("OGG", 0.02), ("MP3", 0.02), ("AIFF", 1e-4)])
def test_other_files(kind: str, error: float) -> None:
    wave = tone(1.0, 48000)
    data = sound_bytes(wave, 48000, kind)
    made, header = heard(data), probed(data)
    expected = 0.1 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    assert len(made.samples) == RATE
    assert np.abs(made.samples - expected)[1000:-1000].max() < error
    assert header.samples == RATE and header.is_exact == (kind in ("FLAC", "AIFF"))


@pytest.mark.parametrize("suffix", ["m4a", "mkv", "mov"])
@pytest.mark.parametrize("channels", [1, 2])
def test_sound_in_containers(tmp_path: Path, suffix: str, channels: int) -> None:
    path = write_container(tmp_path / f"a.{suffix}", tone(1.0, 44100, channels=channels), 44100)
    loader = MediaLoader(tmp_path)
    made, header = loader.load_audio(path.name), loader.probe("audio", path.name)
    assert isinstance(header, AudioHeader) and not header.is_exact
    assert abs(made.seconds - 1.0) < 0.06
    middle = made.samples[4000:12000]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert round(spectrum.argmax() * RATE / len(middle)) == 440
    assert abs(np.abs(middle).max() - 0.05 * (channels + 1)) < 0.01


def test_the_sound_of_a_video(tmp_path: Path) -> None:
    path = write_container(tmp_path / "a.mp4", tone(1.0, RATE), RATE, frames=8)
    loader = MediaLoader(tmp_path)
    clip = loader.load_video(path.name, with_sound=True)
    assert clip.sound is not None and abs(clip.sound.seconds - 1.0) < 0.1
    assert len(clip.frames) == 2 and loader.load_video(path.name).sound is None
    write_video(tmp_path / "mute.mp4", [0] * 8)
    with pytest.raises(DataError, match=r"'mute.mp4' has no sound.*use_audio_in_video"):
        loader.load_video("mute.mp4", with_sound=True)
    with pytest.raises(DataError, match="has no sound"):
        loader.load_video([picture_bytes(_square())], with_sound=True)


def _square() -> Image.Image:
    return Image.new("RGB", (32, 32))


@pytest.mark.filterwarnings("ignore:.*are silent")
@pytest.mark.parametrize("samples", [1, 63, 64, 65, 65535, 65536, 65537, 131072])
def test_headers_of_exact_formats_tell_the_length(samples: int) -> None:
    data = sound_bytes(tone(samples / 44100, 44100), 44100)
    header = probed(data)
    assert header.is_exact and header.samples == len(heard(data).samples)


def test_a_recorder_that_did_not_know_its_length() -> None:
    assert heard(endless_wav(tone(0.5, RATE), RATE)).seconds == 0.5


def test_memory_is_that_of_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the source are dropped once they are resampled."""
    data = sound_bytes(np.zeros((192000 * 2, 6)) + 0.1, 192000)
    largest = 0
    resample = audio._Resampler.add

    def add(self: audio._Resampler, block: np.ndarray) -> None:
        nonlocal largest
        largest = max(largest, block.nbytes)
        resample(self, block)

    monkeypatch.setattr(audio._Resampler, "add", add)
    assert heard(data).seconds == 2.0
    assert largest <= 4 * 65536


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


BROKEN: dict[str, tuple[bytes, str]] = {
    "72 header cut": (sound_bytes(tone(0.1, RATE), RATE)[:20], "is broken or cut"),
    "72 half data": (cut_wav(share=0.5), r"is cut: 0\.50 s of the declared 1\.00 s"),
    "72 half a FLAC": (sound_bytes(tone(2, RATE), RATE, "FLAC")[:9000], "is broken or cut"),
    "72 half an MP3": (_half(sound_bytes(tone(4, RATE), RATE, "MP3")), "is cut"),
    "73 no samples": (sound_bytes(np.zeros((0, 1)), RATE), "has no samples"),
    "73 NaN": (sound_bytes(np.full((100, 1), np.nan), RATE, subtype="FLOAT"), "not numbers"),
    "73 infinite": (sound_bytes(np.full((100, 1), np.inf), RATE, subtype="FLOAT"), "not numbers"),
    "html": (b"<html>404</html>", r"is not a sound \(starts with <html"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "a picture": (picture_bytes(_square(), "JPEG"), "is not a sound but a JPEG picture"),
    "a list of files": (b"ffconcat version 1.0\nfile good.wav\n", r"is not a sound \(starts with ffconcat"),
    "a playlist": (b"#EXTM3U\ngood.wav\n", r"is not a sound \(starts with #EXTM3U"),
    "noise": (bytes(range(256)) * 8, "is not a sound of an allowed format"),
    "a format that is not on the list": (sound_bytes(tone(0.1, RATE), RATE, "AU"), "is not a sound"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_catalogue_f(case: str) -> None:
    data, reason = BROKEN[case]
    with pytest.raises(DataError, match=reason) as caught:
        heard(data)
    assert "'x.wav'" in str(caught.value) and caught.value.problems[0].way_out


def test_cut_containers(tmp_path: Path) -> None:
    whole = write_container(tmp_path / "a.mkv", tone(4.0, RATE), RATE).read_bytes()
    (tmp_path / "half.mkv").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"'half.mkv' is cut: \d\.\d\d s of the declared 4\.\d\d s"):
        MediaLoader(tmp_path).load_audio("half.mkv")


def test_what_is_too_long_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "MAX_SECONDS", 0.5)
    data = sound_bytes(tone(1.0, RATE), RATE)
    for read in (heard, probed):
        with pytest.raises(DataError, match=r"'x.wav' is at least 1 s long, more than 0 s"):
            read(data)
    with pytest.raises(DataError, match="at least"):  # without a header that tells: as soon as it is found
        heard(endless_wav(tone(1.0, RATE), RATE))


def test_silence_is_told() -> None:
    with pytest.warns(UserWarning, match="'x.wav' and perhaps others are silent"):
        assert not heard(sound_bytes(np.zeros((100, 1)), RATE)).samples.any()
