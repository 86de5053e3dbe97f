"""The example of a model that speaks: its codes tell spectra apart, its folder is one of Qwen3-TTS, and a recogniser
understands the digits that it says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.speech.voice import SpeechJob, load_voice

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER, LISTENERS = EXAMPLES / "speaking_digits", EXAMPLES / "spoken_digits"
speaks = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module; what it finds beside it is forgotten again."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(LISTENERS))
    import make_speaking_digits

    yield make_speaking_digits
    for name in ("make_speaking_digits", "tiny_codec", "make_spoken_digits", "tiny_listeners"):
        sys.modules.pop(name, None)


def test_each_voice_says_each_digit_as_often(example: ModuleType) -> None:
    planned = list(example.plan_clips())
    assert planned == list(example.plan_clips())
    counts = Counter((name, clip.digit) for name, clip in planned)
    assert set(counts.values()) == {example.TAKES} and len(counts) == 10 * len(example.VOICES)
    assert len({clip.name for _, clip in planned}) == len(planned)


def test_codes_tell_sounds_apart(example: ModuleType) -> None:
    """Frames of one sound have one code; what the first codebook leaves over is halved by the others at least."""
    import tiny_codec

    draw = np.random.default_rng(0)
    tones = 0.3 * np.sin(np.arange(100)[:, None] / 9 * np.arange(tiny_codec.FRAME) / 40)
    clips = [np.tile(tone, 3).astype(np.float32) for tone in tones]
    codes = tiny_codec.codes_of(clips, draw)
    assert [part.shape for part in codes] == [(3, tiny_codec.CODEBOOKS)] * 100
    whole = np.concatenate(codes)
    assert whole.min() >= 0 and whole.max() < tiny_codec.CODES and len(set(map(tuple, whole))) > 80
    points = np.concatenate([tiny_codec.features(clip) for clip in clips])
    left = points.copy()
    for book in range(tiny_codec.CODEBOOKS):
        for code in set(whole[:, book]):
            left[whole[:, book] == code] -= left[whole[:, book] == code].mean(0)
        if book == 0:
            after_first = (left**2).sum()
    assert (left**2).sum() < after_first / 2 < (points - points.mean(0)).var() * points.size


def test_the_folder_speaks_once_it_has_weights(example: ModuleType, tmp_path: Path) -> None:
    import tiny_codec

    from mindspeed_mm.fsdp.models.qwen3tts.speech_codec import Qwen3TTSSpeechDecoder, decoder_config

    example.write_model(tmp_path)
    tiny_codec.write_codec(Qwen3TTSSpeechDecoder(decoder_config(tiny_codec.DECODER)), tmp_path / "speech_tokenizer")
    arguments = ModelArguments(model_name_or_path=str(tmp_path), train_from_scratch=True)
    model = ModelHub.build(arguments, param_dtype=torch.float32)
    ModelHub.load_weights(model, arguments, seed=0, device=torch.device("cpu"))
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    voice = load_voice(tmp_path)
    assert list(voice.names.values()) == [name.lower() for name in example.VOICES] and voice.rate == tiny_codec.RATE
    said = voice.speak(SpeechJob("seven", Sampling(3, seed=0), "ben"))
    assert said.sound.samples.shape[1] in (2 * tiny_codec.FRAME, 3 * tiny_codec.FRAME)


@speaks
@pytest.mark.slow
def test_digits_that_are_said_are_understood(tmp_path: Path) -> None:
    """The commands of the page, with other folders."""
    mm = [sys.executable, "-m", "mindspeed_mm"]
    run = "runs/speaking_digits/tts"
    for words in (
        [sys.executable, str(LISTENERS / "make_spoken_digits.py")],
        [*mm, "train", str(LISTENERS / "spoken_digits_asr_config.yaml")],
        [sys.executable, str(FOLDER / "make_speaking_digits.py")],
        [*mm, "train", str(FOLDER / "speaking_digits_config.yaml")],
        [
            *mm,
            "evaluate",
            run,
            "--data",
            "runs/speaking_digits/data/test.jsonl",
            "--recogniser",
            "runs/spoken_digits/asr",
        ],
    ):
        subprocess.run(words, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=1500)
    results = json.loads((tmp_path / run / "eval/results.json").read_text())
    assert results["overall"]["n"] >= 100 and results["overall"]["rate"] <= 0.1, results["overall"]
