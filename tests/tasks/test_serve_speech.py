"""`/v1/audio/speech`: what the voice says, in every format; bad requests beside good ones; clients that leave."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import av
import httpx2 as httpx
import numpy as np
import openai
import pytest
import soundfile
import torch
from openai import OpenAI

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.speech.omni import OmniVoice
from mindspeed_mm.fsdp.sampling.speech.voice import Reference, SpeechJob, Voice, load_voice
from mindspeed_mm.fsdp.utils import media_files
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.answer.speech_engine import SpeechEngine
from mindspeed_mm.tasks.requests.serve import Access, ServeRequest
from mindspeed_mm.tasks.serve.limits import Limits
from mindspeed_mm.tasks.serve.serve import engine_of
from tests.helpers.served import NAME, served
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_omni_talker import write_omni
from tests.helpers.tiny_speech_codec import NAMED, VOICE, write_speaker
from tests.tasks.test_serve_safety import post

TIGHT = Limits(
    max_body_mib=3, max_media_mib=1, max_media_seconds=2, max_characters=200, max_new_tokens=40, max_seconds=60
)
ROUTE = "/v1/audio/speech"
RECORDING = f"data:audio/wav;base64,{base64.b64encode(VOICE).decode()}"


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Voice:
    return load_voice(write_speaker(tmp_path_factory.mktemp("named") / "model", **NAMED))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Voice:
    return load_voice(write_speaker(tmp_path_factory.mktemp("base") / "model", talker_config={"spk_id": None}))


@pytest.fixture(scope="module")
def address(named: Voice) -> Iterator[str]:
    with served(SpeechEngine(named), TIGHT) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": NAME, "input": "nine", "response_format": "wav", **fields}).encode()


def asked(address: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{address}{ROUTE}", content=body(**fields), headers={"Content-Type": "application/json"})


def sixteen_bits(samples: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.round(samples.clip(-1, 1) * 32767).astype(np.int16)
    return found


# --- what is said -----------------------------------------------------------------------------------------------------


def test_speech_is_that_of_the_voice(client: OpenAI, named: Voice) -> None:
    for kind in ("wav", "pcm"):
        made = client.audio.speech.create(
            model=NAME, input="nine", voice="VERA", response_format=kind, instructions="slow",  # type: ignore[arg-type]
            extra_body={"seed": 3, "max_new_tokens": 5, "temperature": 0.7},
        )  # fmt: skip
        job = SpeechJob("nine", Sampling(5, temperature=0.7, seed=3), "vera", instructions="slow")
        expected = sixteen_bits(named.speak(job).sound.samples[0])
        if kind == "wav":
            found, rate = soundfile.read(io.BytesIO(made.content), dtype="int16")
            assert rate == 24000
        else:
            found = np.frombuffer(made.content, "<i2")
        np.testing.assert_array_equal(found, expected)
        assert made.response.headers["content-type"] == f"audio/{kind}"
        assert made.response.headers["x-finish-reason"] in ("stop", "length")
    listed = httpx.get(f"{str(client.base_url).rstrip('/')}/models").json()["data"][0]
    assert (listed["routes"], listed["voices"]) == (["speech"], ["uncle", "vera"])


@pytest.mark.parametrize("kind", ["mp3", "flac", "opus", "aac"])
def test_other_formats_hold_the_same_sound(client: OpenAI, kind: Any) -> None:
    asked: dict[str, Any] = {"model": NAME, "input": "nine", "voice": "vera", "extra_body": {"seed": 1}}
    plain = np.frombuffer(client.audio.speech.create(**asked, response_format="pcm").content, "<i2")
    usual = {} if kind == "mp3" else {"response_format": kind}  # as OpenAI's interface has it
    with av.open(io.BytesIO(client.audio.speech.create(**asked, **usual).content)) as container:
        (stream,) = container.streams.audio
        assert stream.codec_context.name.startswith({"mp3": "mp3", "opus": "opus"}.get(kind, kind))
        pieces = [frame.to_ndarray() for frame in container.decode(stream)]
    count = sum(piece.shape[-1] for piece in pieces) * 24000 / stream.rate
    assert len(plain) <= count + 1 and count < len(plain) + 6000
    if kind == "flac":
        assert np.concatenate(pieces, axis=-1).flatten().tolist() == plain.tolist()


def test_a_voice_is_copied(base: Voice) -> None:
    with served(SpeechEngine(base), TIGHT) as address:
        for words in ({}, {"ref_text": "one two"}):
            answer = asked(address, ref_audio=RECORDING, seed=2, max_new_tokens=4, voice="default", **words)
            found, _ = soundfile.read(io.BytesIO(answer.content), dtype="int16")
            reference = Reference(VOICE, "v", words.get("ref_text"))
            expected = base.speak(SpeechJob("nine", Sampling(4, seed=2), reference=reference))
            np.testing.assert_array_equal(found, sixteen_bits(expected.sound.samples[0]))
        status, error = post(address, body(voice="alloy"), ROUTE)
        assert (status, error["error"]["param"]) == (400, "voice") and "no voice 'alloy'" in error["error"]["message"]


# --- what is refused --------------------------------------------------------------------------------------------------

WRONG: dict[str, list[Any]] = {
    "input": [None, "", "  \n", 7, [], {}, "x" * 201],
    "voice": ["nobody", 7, {}, []],
    "instructions": [7, [], "x" * 201],
    "response_format": ["ogg", 7, None, []],
    "speed": [0.5, 4, "fast", []],
    "stream_format": ["sse", 7],
    "ref_text": ["words", 7],
    "ref_audio": [RECORDING, 7, "nothing", "/etc/passwd", "http://127.0.0.1:9/a.wav", "file:///dev/zero",
                  "data:audio/wav;base64,AAAA", "data:audio/wav;base64," + "A" * 1_500_000],
    "seed": [-1, 1.5, 2**63, "x"],
    "temperature": [-1, 2.5, "x", 1e-40],
    "top_p": [0, 1.1, "x"],
    "top_k": [-1, 1.5, "x"],
    "max_new_tokens": [0, 41, 1.5, "x"],
    "model": [7, [], "other"],
    "messages": [[]],
    "stream": [True],
}  # fmt: skip
"""Field → values that are refused."""


def test_bad_requests_are_answered_in_one_line_while_good_ones_go_on(address: str) -> None:
    cases = {
        f"{name} {number}": body(**{name: value})
        for name, values in WRONG.items()
        for number, value in enumerate(values)
    }
    cases |= {
        "empty": b"", "list": b"[]", "bytes": b"\xff\xfe\x00", "deep": b'{"input": ' + b"[" * 100_000,
        "half a character": body(input="\ud800"), "no input": b'{"model": "tiny"}',
        "NaN": b'{"input": "x", "speed": NaN}', "10 MB": body(input="x" * 10_000_000),
    }  # fmt: skip
    whole = body()
    cases |= {f"cut {number}": whole[: len(whole) * number // 20] for number in range(1, 20)}
    stop, good = threading.Event(), []

    def go_on() -> None:
        while not good or not stop.is_set():
            answer = asked(address, max_new_tokens=2)
            good.append((answer.status_code, answer.content[:4]))

    other = threading.Thread(target=go_on)
    other.start()
    wrong = {}
    try:
        for name, sent in cases.items():
            status, answer = post(address, sent, ROUTE)
            error = answer.get("error", {})
            line = str(error.get("message"))
            if (
                not 400 <= status < 500
                or "\n" in line
                or not 0 < len(line) < 400
                or error.keys() != {"message", "type", "param", "code"}
            ):
                wrong[name] = (status, answer)
    finally:
        stop.set()
        other.join(60)
    assert wrong == {}
    assert set(good) == {(200, b"RIFF")}


def test_errors_name_the_field_and_what_there_is(client: OpenAI) -> None:
    for fields, param, says in (
        ({"voice": "alloy"}, "voice", "no voice 'alloy'. Choose one of uncle, vera"),
        ({"extra_body": {"ref_audio": RECORDING}}, "ref_audio", "does not copy voices"),
        ({"speed": 2.0}, "speed", "their own speed"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field", "not a field of this request"),
        ({"extra_body": {"temperature": 1e-9}}, "temperature", "below 0.001"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.audio.speech.create(**{"model": NAME, "input": "nine", "voice": "vera", **fields})
        assert caught.value.param == param and says in caught.value.message


def test_a_codec_that_is_missing_is_told(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(media_files._CODECS, "mp3", ("mp3", "libnothing"))
    with pytest.raises(openai.BadRequestError, match=r"'mp3' cannot be written here(?s:.)*'wav' or 'pcm'"):
        client.audio.speech.create(model=NAME, input="nine", voice="vera")


def test_a_model_that_fails_answers_500_and_the_next_request(named: Any, capfd: pytest.CaptureFixture[str]) -> None:
    import torch

    weight = named.model.talker.codec_head.weight
    kept = weight.detach().clone()
    with served(SpeechEngine(named)) as address:
        with torch.no_grad():
            weight[0] = float("nan")
        try:
            status, answer = post(address, body(), ROUTE)
        finally:
            with torch.no_grad():
                weight.copy_(kept)
        assert status == 500 and answer["error"]["code"] == "not_finite"
        assert asked(address).status_code == 200
    assert "codec_head" in capfd.readouterr().err


def test_a_client_that_leaves_ends_its_speech(named: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def say(job: SpeechJob) -> tuple[np.ndarray, bool]:
        begun.set()
        while not job.is_given_up():
            time.sleep(0.01)
        ended.set()
        return np.zeros(10, np.float32), False

    monkeypatch.setattr(named, "_say", say)
    with served(SpeechEngine(named)) as address:
        host = address.removeprefix("http://")
        import http.client

        connection = http.client.HTTPConnection(host, timeout=30)
        with closing(connection):
            connection.request("POST", ROUTE, body(), {"Content-Type": "application/json"})
            assert begun.wait(30)
        assert ended.wait(30)
    with served(SpeechEngine(named), Limits(max_seconds=0.2)) as address:
        status, answer = post(address, body(), ROUTE)
        assert (status, answer["error"]["code"]) == (408, "max_seconds")


# --- which models -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_omni(tmp_path_factory.mktemp("omni") / "model")


def test_a_model_that_answers_speaks_as_well(omni: Path) -> None:
    """A text is spoken as if it were the answer; both go on in turns."""
    with engine_of(ServeRequest(omni, limits=Limits(max_new_tokens=6))) as engine:
        assert isinstance(engine, AnswerEngine) and engine.speech is not None
        voice = engine.speech.voice
        assert isinstance(voice, OmniVoice)
        with served(engine, Limits(max_new_tokens=6), Access()) as address:
            client = OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
            made = client.audio.speech.create(
                model=NAME, input="nine eight", voice="chelsie", response_format="pcm", extra_body={"seed": 4}
            ).content
            chatted = client.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": "hi"}], max_tokens=3
            )
            listed = httpx.get(f"{address}/v1/models").json()["data"][0]
        assert chatted.choices and listed["routes"][-1] == "speech" and "chat" in listed["routes"]
        steps: list[str] = []
        hooks = [
            part.register_forward_hook(lambda *_, name=name: steps.append(name))
            for name, part in (("thinks", voice.model.thinker), ("talks", voice.model.talker))
        ]
        job = SpeechJob("nine eight", Sampling(6, seed=4), "chelsie")
        expected = voice.speak(job)
        assert (
            np.frombuffer(made, "<i2").tolist() == sixteen_bits(expected.sound.samples[0]).tolist() and len(made) > 20
        )
        whole = Counter(steps)
        assert expected.finished and min(whole.values()) > 2
        for left, most in ((lambda: True, {"thinks": 2, "talks": 2}), (lambda: steps.count("talks") > 2, {"talks": 3})):
            steps.clear()
            said = voice.speak(replace(job, is_given_up=left))
            assert not said.finished and said.sound.samples.shape[1] < expected.sound.samples.shape[1]
            assert Counter(steps) == {**whole, **most}
        for hook in hooks:
            hook.remove()

        given: dict[str, Any] = {}

        def noted(**words: Any) -> tuple[None, torch.Tensor]:
            given.update(words)
            return None, torch.zeros(8)

        with mock.patch.object(voice.model, "generate", noted):
            voice.speak(SpeechJob("nine", Sampling(6, temperature=0.5, top_p=0.8, top_k=7), "chelsie"))
            assert given["talker_temperature"] == 0.5 and given["talker_top_p"] == 0.8 and given["talker_top_k"] == 7
            voice.speak(SpeechJob("nine", Sampling(6, temperature=0), "chelsie"))
            assert given["talker_do_sample"] is False


def test_models_that_do_not_speak_say_so(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "text")
    with engine_of(ServeRequest(folder)) as engine, served(engine) as address:
        status, answer = post(address, body(), ROUTE)
        assert status == 400 and "does not speak" in answer["error"]["message"]


def test_speakers_are_served_whole(tmp_path: Path) -> None:
    folder = write_speaker(tmp_path / "model")
    unfit: dict[str, dict[str, Any]] = {"--engine": {"engine": "vllm"}, "--adapter": {"adapters": (f"a={folder}",)}}
    for key, fields in unfit.items():
        with pytest.raises(UsageError) as caught, engine_of(ServeRequest(folder, **fields)):
            pass
        assert caught.value.problems[0].key == key
    with engine_of(ServeRequest(folder)) as engine:
        assert isinstance(engine, SpeechEngine)
