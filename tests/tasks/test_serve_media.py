"""`mm serve` of generators and speech recognisers: what `mm infer` makes of a request, joined where it can be."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest
from openai import OpenAI
from PIL import Image

from mindspeed_mm.fsdp.utils.media_files import video_bytes
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.draw import generate
from mindspeed_mm.tasks.draw.engine import DrawEngine
from mindspeed_mm.tasks.serve.limits import Limits
from tests.helpers.greedy import greedy_answers
from tests.helpers.served import NAME, served
from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan
from tests.helpers.tiny_sounds import sound_bytes, tone
from tests.tasks.test_transcripts import TOKENS, make_whisper

SETTINGS: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 3.0}
SIZE = "16x16"


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_flux(tmp_path_factory.mktemp("flux"), identity_vae=True)


@pytest.fixture(scope="module")
def engine(flux: Path) -> DrawEngine:
    return DrawEngine(*generate.load_generator(flux), most_samples=4)


@pytest.fixture(scope="module")
def client(engine: DrawEngine) -> Iterator[OpenAI]:
    with served(engine, Limits(max_steps=10, max_samples=3, max_pixels=10_000)) as address:
        yield OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


def drawn(client: OpenAI, prompt: str, *, n: int = 1, seed: int = 7, **changes: Any) -> list[np.ndarray]:
    """The pixels of pictures."""
    body = {**SETTINGS, "seed": seed, **changes}
    made = client.images.generate(model=NAME, prompt=prompt, n=n, size=SIZE, extra_body=body)  # type: ignore[call-overload]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(each.b64_json)))) for each in made.data]


def test_pictures_are_those_of_mm_infer(client: OpenAI, flux: Path, tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text(json.dumps({"prompt": "a cat", "seed": 7}) + "\n")
    settings = {**SETTINGS, "height": 16, "width": 16, "num_samples": 2}
    generate.run(flux, tmp_path / "out", generate.GenerateRequest(prompts_file=rows, settings=settings))
    expected = [np.asarray(Image.open(path)) for path in sorted((tmp_path / "out").glob("*.png"))]
    found = drawn(client, "a cat", n=2)
    assert len(found) == len(expected) == 2 and not np.array_equal(*expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(drawn(client, "a cat", seed=8)[0], expected[0])


def test_equal_requests_are_made_together(client: OpenAI, engine: DrawEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["a cat", "a dog", "one", "two", "three"]
    alone = [drawn(client, prompt)[0] for prompt in prompts]
    other = drawn(client, "a cat", num_inference_steps=3)[0]
    sizes, let, make = [], threading.Event(), engine.sampler.make

    def noted(batch: Any, sampling: Any) -> Any:
        sizes.append((len(batch), sampling.num_inference_steps))
        assert let.wait(30)
        return make(batch, sampling)

    monkeypatch.setattr(engine.sampler, "make", noted)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(drawn, client, "first")
        while not sizes:
            pass
        futures = [pool.submit(drawn, client, prompt) for prompt in prompts]
        different = pool.submit(drawn, client, "a cat", num_inference_steps=3)
        while engine.waiting < 6:
            pass
        let.set()
        first.result()
        together = [future.result()[0] for future in futures]
        np.testing.assert_array_equal(different.result()[0], other)
    assert sorted(sizes) == [(1, 2), (1, 2), (1, 3), (4, 2)]
    for one, joined in zip(alone, together, strict=True):  # sums over more rows may round otherwise
        assert np.abs(one.astype(int) - joined.astype(int)).max() <= 1


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"n": 4}, openai.APIStatusError, "--max-samples 3"),
        ({"extra_body": {"num_inference_steps": 11}}, openai.APIStatusError, "--max-steps 10"),
        ({"size": "160x160"}, openai.APIStatusError, "--max-pixels"),
        ({"size": "15x16"}, openai.BadRequestError, "multiple"),
        ({"size": "huge"}, openai.BadRequestError, "'size'"),
        ({"response_format": "url"}, openai.BadRequestError, "'response_format'"),
        ({"quality": "hd"}, openai.BadRequestError, "'quality': 'hd' is not supported here"),
        ({"extra_body": {"stile": "vivid"}}, openai.BadRequestError, "'stile' is not a field"),
        ({"output_format": "mp4"}, openai.BadRequestError, "'output_format'"),
        ({"model": "other"}, openai.NotFoundError, "only 'tiny'"),
        ({"prompt": 7}, openai.BadRequestError, "'prompt'"),
    ],
)
def test_bad_requests(client: OpenAI, changes: dict[str, Any], error: type[Exception], said: str) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": "a cat", "size": SIZE, **changes}
    with pytest.raises(error, match=said):
        client.images.generate(**asked)


@pytest.mark.edge("BR17")
@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_pictures_come_in_the_format_that_is_asked_for(client: OpenAI, kind: Any) -> None:
    made = client.images.generate(
        model=NAME, prompt="a cat", size=SIZE, output_format=kind, extra_body={**SETTINGS, "seed": 7}
    )
    assert made.data and made.data[0].b64_json
    picture = Image.open(io.BytesIO(base64.b64decode(made.data[0].b64_json)))
    assert picture.format == kind.upper()
    expected = io.BytesIO()
    Image.fromarray(drawn(client, "a cat")[0]).save(expected, kind, quality=95)
    np.testing.assert_array_equal(np.asarray(picture), np.asarray(Image.open(expected)))


def test_a_generator_neither_talks_nor_films(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is nothing at"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "hello"}])
    answer = httpx.post(f"{client.base_url}videos/generations", json={"prompt": "a cat", "size": SIZE}, timeout=60)
    assert answer.status_code == 404 and "/v1/images/generations" in answer.json()["error"]["message"]


def test_clips(tmp_path: Path) -> None:
    engine = DrawEngine(*generate.load_generator(make_tiny_wan(tmp_path, identity_vae=True)))
    body = {**SETTINGS, "prompt": "a dog", "size": SIZE, "num_frames": 5, "seed": 3, "fps": 8}
    with served(engine) as address:
        answer = httpx.post(f"{address}/v1/videos/generations", json=body, timeout=60).json()
    engine = DrawEngine(*generate.load_generator(tmp_path))
    sampling = engine.defaults.model_copy(update={**SETTINGS, "height": 16, "width": 16, "num_frames": 5, "fps": 8.0})
    (job,) = engine.jobs(generate.Prompt(0, "a dog", "test", seed=3), sampling)
    frames = engine.submit(job).result(60).frames
    assert frames.shape == (5, 16, 16, 3)
    assert base64.b64decode(answer["data"][0]["b64_json"]) == video_bytes(frames, 8)


def test_transcripts(tmp_path: Path) -> None:
    from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
    from mindspeed_mm.fsdp.sampling.answers.questions import ask

    generator = load_generator(make_whisper(tmp_path))
    sounds = [sound_bytes(tone(0.5, 16000, hertz), 16000) for hertz in (220.0, 1760.0, 660.0)]
    loader = generator.encoder.media(tmp_path)
    questions = [generator.encoder.encode(ask("", [MediaItem("audio", sound)]).sample, loader) for sound in sounds]
    expected = [greedy_answers(generator, [question], TOKENS)[0].text for question in questions]
    assert len(set(expected)) > 1
    with served(AnswerEngine(generator), Limits(max_new_tokens=TOKENS)) as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        assert client.models.retrieve(NAME).model_extra == {"routes": ["chat", "transcriptions"]}

        def heard(sound: bytes) -> str:
            return client.audio.transcriptions.create(model=NAME, file=("a.wav", sound)).text

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(heard, sounds)) == expected
        asked: dict[str, Any] = {"model": NAME, "file": ("a.wav", sounds[0])}
        assert client.audio.transcriptions.create(response_format="text", **asked) == expected[0]
        for changes, said in (
            ({"response_format": "srt"}, "json or text"),
            ({"file": ("a.wav", b"nothing heard")}, "audio|sound|not"),
            ({"model": "other"}, "only 'tiny'"),
        ):
            with pytest.raises(openai.APIStatusError, match=said):
                client.audio.transcriptions.create(**{**asked, **changes})
        torn = httpx.post(
            f"{address}/v1/audio/transcriptions", content=b"--x\r\nno form", timeout=60,
            headers={"Content-Type": "multipart/form-data; boundary=x"},
        )  # fmt: skip
        assert torn.status_code == 400 and "error" in torn.json()


@pytest.mark.edge("BN14")
def test_one_seed_is_one_picture_for_the_server_and_mm_infer(client: OpenAI, flux: Path, tmp_path: Path) -> None:
    """As `--seed`, and as the seed of a row, whatever line the row stands in."""
    served_ = drawn(client, "a red box", n=2, seed=11)
    height, width = map(int, SIZE.split("x"))
    settings = {**SETTINGS, "height": height, "width": width, "num_samples": 2}
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "another", "seed": 3}\n{"prompt": "a red box", "seed": 11}\n')
    asked = {
        "seed": generate.GenerateRequest(prompts=("a red box",), settings={**settings, "seed": 11}),
        "row": generate.GenerateRequest(prompts_file=rows, settings=settings),
    }
    for name, request in asked.items():
        generate.run(flux, tmp_path / name, request)
        for number, picture in enumerate(served_):
            (file,) = (tmp_path / name).glob(f"*_{number:02}_a-red-box.png")
            assert (np.asarray(Image.open(file)) == picture).all()
