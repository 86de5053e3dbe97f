"""Kaldi's filterbank and the frames of a low rate that Fun-ASR-Nano hears, beside their definitions in fp64."""

from __future__ import annotations

import importlib
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_mm.fsdp.utils import fun_asr_features
from mindspeed_mm.fsdp.utils.fun_asr_features import log_mel, provide_fun_asr_features
from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()

import transformers  # noqa: E402  (the guard comes first)

RATE, FRAME, SHIFT, SIZE = 16000, 400, 160, 512
SHAPE = {"rate": RATE, "frame_ms": 25, "shift_ms": 10}


def sound(count: int, seed: int = 0) -> np.ndarray:
    """(count,) a gliding tone with noise and an offset, between -1 and 1."""
    draw, times = np.random.default_rng(seed), np.arange(count) / RATE
    return (0.3 * np.sin(2 * np.pi * (200 + 900 * times) * times) + 0.02 * draw.standard_normal(count) + 0.05).astype(
        np.float32
    )


def mel(hertz: float) -> float:
    return 1127.0 * math.log(1.0 + hertz / 700.0)


def fbank_by_definition(samples: np.ndarray, bands: int) -> np.ndarray:
    """(frames, bands): Kaldi's `compute-fbank-feats --dither=0 --window-type=hamming`, number by number."""
    turns = np.exp(-2j * np.pi * np.outer(np.arange(SIZE // 2), np.arange(FRAME)) / SIZE)
    low, high = mel(20.0), mel(RATE / 2)
    step = (high - low) / (bands + 1)
    rows = []
    for start in range(0, len(samples) - FRAME + 1, SHIFT):
        wave = [float(value) for value in samples[start : start + FRAME]]
        mean = math.fsum(wave) / FRAME
        wave = [value - mean for value in wave]
        emphasised = [value - 0.97 * wave[max(i - 1, 0)] for i, value in enumerate(wave)]
        windowed = [
            value * (0.54 - 0.46 * math.cos(2 * math.pi * i / (FRAME - 1))) for i, value in enumerate(emphasised)
        ]
        power = np.abs(turns @ np.array(windowed)) ** 2
        row = []
        for band in range(bands):
            left, peak, right = (low + (band + place) * step for place in range(3))
            energy = 0.0
            for number, value in enumerate(power):
                place = mel(number * RATE / SIZE)
                if left < place < right:
                    energy += value * (
                        (place - left) / (peak - left) if place <= peak else (right - place) / (right - peak)
                    )
            row.append(math.log(max(energy, 2.0**-23)))
        rows.append(row)
    return np.array(rows).reshape(-1, bands)


def stacked_by_definition(frames: np.ndarray, wide: int, stride: int) -> np.ndarray:
    """Frame n of the low rate: `wide` frames around frame n · `stride`, those beyond an end being the last there."""
    last = len(frames) - 1
    return np.stack(
        [
            np.concatenate([frames[min(max(n * stride + k - (wide - 1) // 2, 0), last)] for k in range(wide)])
            for n in range(-(-len(frames) // stride))
        ]
    )


@pytest.mark.parametrize("count", [400, 559, 560, 4321])
def test_the_filterbank_equals_its_definition(count: int) -> None:
    found = log_mel(sound(count), bands=23, **SHAPE)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, fbank_by_definition(sound(count), 23), rtol=1e-10, atol=1e-10)


def test_silence_has_the_floor_and_a_click_too_short_no_frame() -> None:
    assert np.all(log_mel(np.zeros(400), bands=23, **SHAPE) == math.log(2.0**-23))
    assert log_mel(np.zeros(399), bands=23, **SHAPE).shape == (0, 23)


@pytest.mark.parametrize(("name", "wrong"), [("PREEMPHASIS", 0.95), ("LOWEST_HZ", 0.0), ("_HAMMING", (0.5, 0.5))])
def test_the_comparison_sees_a_fault(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any) -> None:
    fun_asr_features._triangles.cache_clear(), fun_asr_features._window.cache_clear()
    monkeypatch.setattr(fun_asr_features, name, wrong)
    found = log_mel(sound(1000), bands=23, **SHAPE)
    fun_asr_features._triangles.cache_clear(), fun_asr_features._window.cache_clear()
    assert np.abs(found - fbank_by_definition(sound(1000), 23)).max() > 1e-3


@pytest.fixture
def extractor() -> Any:
    if not hasattr(transformers, "FunAsrNanoFeatureExtractor"):
        pytest.skip("this transformers has no Fun-ASR-Nano")
    provide_fun_asr_features()
    return importlib.import_module("transformers").FunAsrNanoFeatureExtractor(feature_size=23)  # the module of today


def test_features_equal_their_definition(extractor: Any) -> None:
    sounds = [sound(9000), sound(3000, seed=1)]
    made = extractor(sounds, sampling_rate=RATE)
    expected = [stacked_by_definition(fbank_by_definition(each, 23), 7, 6) for each in sounds]
    assert made["input_features_mask"].sum(-1).tolist() == [len(each) for each in expected] == [9, 3]
    for row, each in zip(made["input_features"], expected, strict=True):
        np.testing.assert_allclose(row[: len(each)], each, rtol=1e-6, atol=1e-6)
        assert not row[len(each) :].any()


def test_the_extractor_is_saved_read_and_sent(extractor: Any, tmp_path: Path) -> None:
    extractor.save_pretrained(tmp_path)
    read = transformers.AutoFeatureExtractor.from_pretrained(tmp_path)
    assert type(read) is type(extractor) and read.feature_size == 23
    sent = pickle.loads(pickle.dumps(read))
    assert type(sent) is type(extractor)
    np.testing.assert_array_equal(sent(sound(3000))["input_features"], extractor(sound(3000))["input_features"])


def test_a_sound_without_a_frame_is_refused(extractor: Any) -> None:
    with pytest.raises(ValueError, match="shorter than a frame"):
        extractor(sound(300))
