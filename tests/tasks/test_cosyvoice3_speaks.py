"""CosyVoice3 by the doors that speak: `mm infer --speak` and `/v1/audio/speech`."""

from __future__ import annotations

import base64
import io
import json
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
from openai import BadRequestError, InternalServerError, OpenAI

from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.speech.voice import SpeechJob, load_voice
from mindspeed_mm.tasks.answer.speech_engine import SpeechEngine
from tests.helpers.runs import mm
from tests.helpers.served import NAME, served
from tests.helpers.tiny_cosyvoice3 import make_tiny_cosyvoice3
from tests.helpers.tiny_sounds import sound_bytes, tone

TEXT = "seven one two"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_cosyvoice3(tmp_path_factory.mktemp("cosyvoice3") / "model")


def heard(file: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(file)) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (24_000, 1, 2)
        return np.frombuffer(sound.readframes(sound.getnframes()), "<i2")


def test_both_doors_say_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the server lacks for a recording is no fault of the request."""
    voice = load_voice(folder)
    said = voice.speak(SpeechJob(TEXT, Sampling(99, seed=3), name="anna", instructions="Whisper."))
    expected = (said.sound.samples[0] * 32767).round()

    words = ["--prompt", TEXT, "--speak", tmp_path / "said.wav", "--speaker", "Anna", "--instructions", "Whisper."]
    done = mm("infer", folder, *words, "--seed", 3, "--max-new-tokens", 99, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["seconds"] == pytest.approx(len(expected) / 24_000)
    assert np.array_equal(heard((tmp_path / "said.wav").read_bytes()), expected)

    more = {"seed": 3, "max_new_tokens": 99}
    with served(SpeechEngine(voice)) as address, OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0) as client:

        def ask(name: str) -> bytes:
            made = client.audio.speech.create(
                model=NAME, input=TEXT, voice=name, instructions="Whisper.", response_format="wav", extra_body=more
            )
            return made.read()

        assert np.array_equal(heard(ask("anna")), expected)
        with pytest.raises(BadRequestError, match="Vera, anna"):
            ask("Otto")
        recording = base64.b64encode(sound_bytes(tone(1, 8_000, 200), 8_000)).decode()
        more["ref_audio"] = f"data:audio/wav;base64,{recording}"
        for package, says in ((sys, "has no file speech_tokenizer_v3.onnx"), (None, "onnxruntime is not installed")):
            monkeypatch.setitem(sys.modules, "onnxruntime", package)
            with pytest.raises(InternalServerError) as caught:
                ask("")
            error = caught.value
            assert (error.status_code, error.param, error.code) == (501, "ref_audio", "unavailable")
            assert error.type == "server_error" and says in error.message and str(folder) not in error.message
        assert "pip install 'mindspeed-mm[speech]'" in error.message and says in capfd.readouterr().err


def test_what_it_cannot_say_is_told(folder: Path, tmp_path: Path) -> None:
    for words, says in (
        ((TEXT, "--speaker", "Otto"), "no voice 'Otto'"),
        ((TEXT, "--beams", 3), "not searched by beams"),
        ((" ",), "nothing to say"),
    ):
        done = mm("infer", folder, "--speak", tmp_path / "said.wav", "--prompt", *words)
        assert done.code and says in done.err, done.err
    assert not (tmp_path / "said.wav").exists()
