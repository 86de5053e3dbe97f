"""CosyVoice3 hears recordings: its networks get the spectra that are published, and what they find leads the voice."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()

from mindspeed_mm.core.errors import DataError, MachineError, ModelFolderError  # noqa: E402
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling  # noqa: E402
from mindspeed_mm.fsdp.sampling.speech.cosyvoice3.reference import campplus_spectrum, tokenizer_spectrum  # noqa: E402
from mindspeed_mm.fsdp.sampling.speech.cosyvoice3.voice import CosyVoice3Voice  # noqa: E402
from mindspeed_mm.fsdp.sampling.speech.voice import Reference, SpeechJob  # noqa: E402
from tests.helpers.tiny_cosyvoice3 import CODEC, FLOW, make_tiny_cosyvoice3, sound_by_parts  # noqa: E402
from tests.helpers.tiny_sounds import sound_bytes, tone  # noqa: E402

TEXT = "seven one two"
PREFIX = "You are a helpful assistant.<|endofprompt|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_cosyvoice3(tmp_path_factory.mktemp("cosyvoice3") / "model")


def slaney_bands(size: int, bands: int, rate: int) -> np.ndarray:
    """(size / 2 + 1, bands) triangles of Slaney's Auditory Toolbox up to half the rate, each of one area."""

    def hertz(mel: float) -> float:
        return 200 / 3 * mel if mel < 15 else 1000 * math.exp(math.log(6.4) / 27 * (mel - 15))

    top = 15 + 27 * math.log(rate / 2 / 1000) / math.log(6.4)
    edges = [hertz(top * n / (bands + 1)) for n in range(bands + 2)]
    places = np.arange(size // 2 + 1) * rate / size
    made = np.zeros((len(places), bands))
    for n in range(bands):
        low, middle, high = edges[n : n + 3]
        rise, fall = (places - low) / (middle - low), (high - places) / (high - middle)
        made[:, n] = np.maximum(0, np.minimum(rise, fall)) * 2 / (high - low)
    return made


def kaldi_spectrum(samples: np.ndarray) -> np.ndarray:
    """Kaldi's `compute-fbank-feats` without dither: 25 ms every 10 ms, Povey's window, 80 bands from 20 Hz."""
    frames = [samples[at : at + 400].astype(np.float64) for at in range(0, len(samples) - 399, 160)]
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 399)) ** 0.85
    low, high = (1127 * math.log(1 + hertz / 700) for hertz in (20, 8000))
    edges = np.linspace(low, high, 82)
    mel = 1127 * np.log(1 + np.arange(257) * 16000 / 512 / 700)
    rows = []
    for frame in frames:
        frame = frame - frame.mean()
        frame = np.concatenate(([frame[0] * 0.03], frame[1:] - 0.97 * frame[:-1])) * window
        power = np.abs(np.fft.rfft(frame, 512)) ** 2
        row = []
        for n in range(80):
            rise = (mel - edges[n]) / (edges[n + 1] - edges[n])
            fall = (edges[n + 2] - mel) / (edges[n + 2] - edges[n + 1])
            row.append(math.log(max(power @ np.maximum(0, np.minimum(rise, fall)), 1.1920929e-07)))
        rows.append(row)
    made = np.array(rows)
    return made - made.mean(0)


def whisper_spectrum(samples: np.ndarray) -> np.ndarray:
    wave = torch.from_numpy(samples.astype(np.float64))
    spectrum = torch.stft(wave, 400, 160, window=torch.hann_window(400, dtype=torch.float64), return_complex=True)
    power = (spectrum[:, :-1].abs() ** 2).numpy()
    made = np.log10(np.maximum(slaney_bands(400, 128, 16_000).T @ power, 1e-10))
    return (np.maximum(made, made.max() - 8) + 4) / 4


def noisy(seconds: float, rate: int) -> np.ndarray:
    steps = np.arange(round(seconds * rate)) / rate
    draw = np.random.default_rng(0)
    sound = 0.4 * np.sin(2 * np.pi * (200 + 900 * steps) * steps) + 0.05 * draw.standard_normal(len(steps))
    return sound.astype(np.float32)


def test_the_networks_hear_the_published_spectra() -> None:
    samples = noisy(0.5, 16_000)
    heard = campplus_spectrum(samples)
    assert heard.shape == (48, 80) and heard.dtype == np.float32
    np.testing.assert_allclose(heard, kaldi_spectrum(samples), atol=2e-3)
    heard = tokenizer_spectrum(samples)
    assert heard.shape == (128, 50) and heard.dtype == np.float32
    np.testing.assert_allclose(heard, whisper_spectrum(samples), atol=2e-4)


class Session:
    """Stands for onnxruntime's: the speaker vector and the tokens are made of what is heard."""

    heard: list[np.ndarray] = []

    def __init__(self, path: str, _options: Any, providers: list[str]) -> None:
        assert providers == ["CPUExecutionProvider"]
        self.hears_speakers = path.endswith("campplus.onnx")

    def get_inputs(self) -> list[SimpleNamespace]:
        names = ["input"] if self.hears_speakers else ["feats", "feats_length"]
        return [SimpleNamespace(name=name) for name in names]

    def run(self, _outputs: None, given: dict[str, np.ndarray]) -> list[np.ndarray]:
        Session.heard += given.values()
        if self.hears_speakers:
            return [given["input"].mean(1)[:, :12] + np.arange(12, dtype=np.float32)]
        assert given["feats_length"].dtype == np.int32
        frames = int(given["feats_length"][0])
        assert given["feats"].shape == (1, 128, frames)
        return [np.arange(frames // 4)[None] * 7 % CODEC]


@pytest.fixture
def hearing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("onnxruntime")
    module.InferenceSession, module.SessionOptions = Session, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "onnxruntime", module)
    for name in ("campplus.onnx", "speech_tokenizer_v3.onnx"):
        (folder / name).touch()
    Session.heard = []


@pytest.mark.parametrize("words", [None, "four"])
def test_a_recording_lends_its_voice(folder: Path, hearing: None, words: str | None) -> None:
    """0.1 s more than the tokens last is cut off its mel."""
    voice = CosyVoice3Voice(folder)
    reference = Reference(sound_bytes(noisy(0.5, 24_000), 24_000), "voice.wav", words)
    said = voice.speak(SpeechJob(TEXT, Sampling(99, seed=7), reference=reference))
    tokens = [7 * n % CODEC for n in range(12)]
    spectrum, length = Session.heard[0], Session.heard[1]
    np.testing.assert_allclose(spectrum[0], whisper_spectrum(reference.at(16_000)), atol=2e-4)
    assert length.tolist() == [50]
    np.testing.assert_allclose(Session.heard[2][0], kaldi_spectrum(reference.at(16_000)), atol=2e-3)
    wave = np.pad(reference.at(24_000).astype(np.float64), 144, mode="reflect")
    frames = np.stack([wave[at : at + 384] for at in range(0, len(wave) - 383, 96)])
    power = np.abs(np.fft.rfft(frames * (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(384) / 384)))) ** 2
    mel = np.log(np.maximum(np.sqrt(power + 1e-9) @ slaney_bands(384, FLOW.mel_dim, 24_000), 1e-5)).astype(np.float32)
    vector = torch.from_numpy(Session.heard[2].mean(1)[0, :12] + np.arange(12, dtype=np.float32))
    guide = (vector, tokens, torch.from_numpy(mel[:24]))
    expected = sound_by_parts(voice, TEXT, PREFIX + (words or ""), tokens if words else [], guide)
    np.testing.assert_allclose(said.sound.samples[0], expected, atol=1e-4)
    assert said.name is None


def test_recordings_that_cannot_be_heard(folder: Path, hearing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    voice = CosyVoice3Voice(folder)

    def speak(seconds: float) -> None:
        reference = Reference(sound_bytes(tone(seconds, 8_000, 200), 8_000), "voice.wav")
        voice.speak(SpeechJob(TEXT, Sampling(9, seed=1), reference=reference))

    with pytest.raises(DataError, match=r"lasts 31.0 s, and the model hears up to 30 s"):
        speak(31)
    with pytest.raises(DataError, match="too short"):
        speak(0.05)
    (folder / "speech_tokenizer_v3.onnx").unlink()
    with pytest.raises(ModelFolderError, match=r"has no file speech_tokenizer_v3.onnx"):
        speak(1)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MachineError, match=r"onnxruntime is not installed(.|\n)*mindspeed-mm\[speech\]"):
        speak(1)


def test_onnx_files_are_run(folder: Path, tmp_path: Path) -> None:
    """By onnxruntime itself, where it is installed."""
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    copy = shutil.copytree(folder, tmp_path / "model")
    one, many = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
    make = onnx.helper

    def save(name: str, nodes: list[Any], inputs: list[Any], output: Any, constants: list[Any]) -> None:
        graph = make.make_graph(nodes, "small", inputs, [output], constants)
        onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 13)], ir_version=8), copy / name)

    bounds = [onnx.numpy_helper.from_array(np.array([n], dtype=np.int64), name) for n, name in ((0, "a"), (12, "b"))]
    axis = onnx.numpy_helper.from_array(np.array([1], dtype=np.int64), "axis")
    save(
        "campplus.onnx",
        [make.make_node("ReduceMean", ["x"], ["m"], axes=[1], keepdims=0),
         make.make_node("Slice", ["m", "a", "b", "axis"], ["y"])],
        [make.make_tensor_value_info("x", one, [1, "T", 80])],
        make.make_tensor_value_info("y", one, [1, 12]), [*bounds, axis],
    )  # fmt: skip
    first = [onnx.numpy_helper.from_array(np.array([n], dtype=np.int64), name) for n, name in ((0, "a"), (9, "b"))]
    save(
        "speech_tokenizer_v3.onnx",
        [make.make_node("ReduceMean", ["x"], ["m"], axes=[1], keepdims=0),
         make.make_node("Slice", ["m", "a", "b", "axis"], ["s"]), make.make_node("Abs", ["s"], ["t"]),
         make.make_node("Cast", ["t"], ["c"], to=many), make.make_node("Mul", ["c", "n"], ["z"]),
         make.make_node("Cast", ["z"], ["y"], to=many)],
        [make.make_tensor_value_info("x", one, [1, 128, "T"]), make.make_tensor_value_info("n", many, [1])],
        make.make_tensor_value_info("y", many, [1, "N"]), [*first, axis],
    )  # fmt: skip
    reference = Reference(sound_bytes(noisy(0.5, 16_000), 16_000), "voice.wav")
    guide = CosyVoice3Voice(copy)._listener.hear(reference)
    assert guide.vector_S.shape == (12,) and list(guide.tokens) == [0] * 9 and guide.mel_TM.shape == (18, FLOW.mel_dim)
    (copy / "campplus.onnx").write_bytes(b"no network")
    with pytest.raises(ModelFolderError, match=r"campplus.onnx.*cannot be run"):
        CosyVoice3Voice(copy)._listener.hear(reference)
