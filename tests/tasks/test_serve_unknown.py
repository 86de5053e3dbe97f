"""Every route refuses a field that it does not know, by name; transcripts are made as their requests say."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import numpy as np
import openai
import pytest
import soundfile
import torch
from openai import OpenAI
from starlette.routing import Route

from mindspeed_mm.fsdp.sampling.speech.voice import load_voice
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.answer.speech_engine import SpeechEngine
from mindspeed_mm.tasks.draw import generate
from mindspeed_mm.tasks.draw.engine import DrawEngine
from mindspeed_mm.tasks.requests.serve import Access
from mindspeed_mm.tasks.serve.app import routes_of
from mindspeed_mm.tasks.serve.backend import Backend
from mindspeed_mm.tasks.serve.fields import Names
from mindspeed_mm.tasks.serve.limits import Limits
from mindspeed_mm.tasks.serve.metrics import Metrics
from tests.helpers.served import NAME, served
from tests.helpers.tiny_generators import make_tiny_flux
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_sounds import sound_bytes, tone
from tests.helpers.tiny_speech_codec import write_speaker
from tests.tasks.test_transcripts import TOKENS, make_whisper

UNKNOWN = "no_such_field"
FIELDS = {"chat": "messages", "speech": "input"}
"""Part of a route → the field that it needs, where that is no prompt."""
SOUND = sound_bytes(tone(0.5, 16_000, 220.0), 16_000)


def make_engine(kind: str, folder: Path) -> Any:
    if kind == "draws":
        return DrawEngine(*generate.load_generator(make_tiny_flux(folder, identity_vae=True)))
    if kind == "speaks":
        return SpeechEngine(load_voice(write_speaker(folder)))
    if kind == "behind":
        return Backend(9, "key", NAME)
    return AnswerEngine(load_generator(make_whisper(folder) if kind == "hears" else make_tiny_qwen3_vl(folder)))


@pytest.mark.edge("BR17b")
@pytest.mark.parametrize("kind", ["talks", "hears", "draws", "speaks", "behind"])
def test_every_route_names_a_field_that_it_does_not_know(kind: str, tmp_path: Path) -> None:
    engine, asked = make_engine(kind, tmp_path / "model"), set()
    with served(engine) as address:
        for route in routes_of(engine, Names(NAME), Limits(), Access(), Metrics()):
            assert isinstance(route, Route) and route.methods
            path = f"{address}{route.path.replace('{name:path}', NAME)}"
            if "POST" not in route.methods:
                answer = httpx.get(path, params={UNKNOWN: "1"})
                assert httpx.get(path).status_code == 200
            elif route.path.endswith("transcriptions"):
                answer = httpx.post(path, data={UNKNOWN: "1"}, files={"file": ("a.wav", SOUND)})
            else:
                field = next((each for part, each in FIELDS.items() if part in route.path), "prompt")
                needed = [{"role": "user", "content": "x"}] if field == "messages" else "x"
                answer = httpx.post(path, json={"model": NAME, field: needed, UNKNOWN: 1})
            error = answer.json()["error"]
            names_it = f"'{UNKNOWN}'" in error["message"] and error["param"] == UNKNOWN
            assert answer.status_code == 400 and (names_it or error["code"] == "unsupported_route"), (path, error)
            asked.add(route.path)
    assert len(asked) > 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Whisper that knows two languages, and names none."""
    folder = make_whisper(tmp_path_factory.mktemp("whisper"))
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text())
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    german = tokenizer.convert_tokens_to_ids("<|de|>")
    settings |= {"lang_to_id": {**settings["lang_to_id"], "<|de|>": german}}
    settings |= {"prev_sot_token_id": tokenizer.convert_tokens_to_ids("<|startofprev|>")}
    path.write_text(json.dumps(settings))
    return folder


@pytest.fixture(autouse=True)
def prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny tokenizer's marks have small ids, by which the real ones' method tells marks from words."""

    def ids(self: Any, text: str, return_tensors: str = "np") -> Any:
        found = [self.convert_tokens_to_ids("<|startofprev|>"), *self(text, add_special_tokens=False)["input_ids"]]
        return torch.tensor(found) if return_tensors == "pt" else np.array(found)

    from transformers import WhisperTokenizer

    monkeypatch.setattr(WhisperTokenizer, "get_prompt_ids", ids)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[OpenAI]:
    with served(AnswerEngine(load_generator(folder)), Limits(max_new_tokens=TOKENS)) as address:
        yield OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


def heard(client: OpenAI, **fields: Any) -> str:
    return client.audio.transcriptions.create(model=NAME, file=("a.wav", SOUND), **fields).text


def by_transformers(folder: Path, prompt: str = "", **settings: Any) -> str:
    from transformers import AutoProcessor, WhisperForConditionalGeneration

    processor = AutoProcessor.from_pretrained(folder)
    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    samples, rate = soundfile.read(io.BytesIO(SOUND))
    features = processor.feature_extractor(samples, sampling_rate=rate, return_tensors="pt").input_features
    if prompt:
        settings["prompt_ids"] = processor.get_prompt_ids(prompt, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(features, max_new_tokens=TOKENS, do_sample=False, return_timestamps=False, **settings)[0]
    text: str = processor.tokenizer.decode(ids, skip_special_tokens=True)
    return text.strip()


@pytest.mark.edge("BR17b")
def test_whisper_hears_as_it_is_told(client: OpenAI, folder: Path) -> None:
    german = by_transformers(folder, language="de", task="transcribe")
    english = by_transformers(folder, language="en", task="transcribe")
    assert german != english
    assert {heard(client, language=each) for each in ("de", "German", "<|de|>")} == {german}
    assert heard(client, language="en") == english
    plain = by_transformers(folder)
    assert heard(client) == plain == heard(client, temperature=0)
    prompted = by_transformers(folder, "a b", language="en", task="transcribe")
    assert heard(client, language="en", prompt="a b") == prompted != english
    warm = {heard(client, language="en", temperature=1) for _ in range(6)}
    assert len(warm) > 1


@pytest.mark.edge("BR17b")
def test_what_whisper_cannot_do_is_refused_by_name(client: OpenAI) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("language", {"language": "xx"}), ("language", {"language": "fr"}), ("temperature", {"temperature": 2}),
        ("prompt", {"prompt": "a b c d " * 40}), ("response_format", {"response_format": "srt"}),
        ("timestamp_granularities[]", {"timestamp_granularities": ["word"]}), ("stream", {"stream": True}),
        ("include[]", {"include": ["logprobs"]}), ("chunking_strategy", {"chunking_strategy": "auto"}),
    ]  # fmt: skip
    for name, fields in wrong:
        with pytest.raises(openai.BadRequestError) as caught:
            heard(client, **fields)
        assert caught.value.param == name and caught.value.message, fields
    base = str(client.base_url)
    path = f"{urlsplit(base).scheme}://{urlsplit(base).netloc}/v1/audio/transcriptions"
    twice = [("file", ("a.wav", SOUND)), ("file", ("b.wav", SOUND))]
    assert httpx.post(path, files=twice).json()["error"]["message"] == "the form has 'file' twice."
    asked: Any = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "temperature": 1}
    with pytest.raises(openai.BadRequestError, match="/v1/audio/transcriptions takes a temperature"):
        client.chat.completions.create(**asked)
