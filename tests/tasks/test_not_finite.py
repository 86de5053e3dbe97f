"""A model whose numbers are not finite is neither served nor answered by nor scored: a 500 in the server, exit code 4
elsewhere; and a request whose numbers are not finite fails alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI

from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.finite import NotFiniteError
from mindspeed_mm.tasks.answer.continuous import ContinuousWorker, is_new_enough
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.draw import generate
from mindspeed_mm.tasks.draw.engine import DrawEngine
from tests.helpers.runs import mm
from tests.helpers.served import NAME, served
from tests.helpers.tiny_generators import make_tiny_flux
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_sounds import sound_bytes, tone
from tests.tasks.test_transcripts import make_whisper

TEXTS = ["one", "zebra", "two", "zebra crossing", "three four"]
BAD = [False, True, False, True, False]
TOKENS = 6
pytestmark = pytest.mark.edge("BS1")


def set_nan(weight: torch.Tensor, place: Any = ...) -> None:
    with torch.no_grad():
        weight[place] = float("nan")


@contextmanager
def asking(engine: Any) -> Iterator[OpenAI]:
    with served(engine) as address:
        yield OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


def said(client: OpenAI, text: str, **fields: Any) -> str | None:
    """What is answered; None for the error of numbers that are not finite."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": TOKENS}
    try:
        return client.chat.completions.create(model=NAME, **asked, **fields).choices[0].message.content
    except openai.InternalServerError as error:
        assert error.code == "not_finite" and "token 1 of the answer" in error.message
        assert error.body["type"] == "server_error" and "embed_tokens.weight" in error.message  # type: ignore[index]
        return None


@pytest.fixture
def generator(tmp_path: Path) -> Generator:
    return load_generator(make_tiny_qwen3(tmp_path / "model", seed=3, initializer_range=0.4))


def engine_of(generator: Generator, kind: str) -> AnswerEngine:
    if kind == "batches":
        return AnswerEngine(generator)
    return AnswerEngine(generator, worker=ContinuousWorker(generator, most_rows=8))


@pytest.mark.parametrize("kind", ["batches", "continuous"])
def test_one_request_fails_and_its_neighbours_are_answered(
    generator: Generator, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "continuous" and not is_new_enough():
        pytest.skip("this transformers is too old for it")
    with asking(engine_of(generator, kind)) as client:
        before = [said(client, text) for text in TEXTS]
        drawn = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "one"}], temperature=1.2, seed=5, max_tokens=TOKENS
        )
        set_nan(generator.model.get_input_embeddings().weight, generator.tokenizer.encode("z")[0])
        for _ in range(2):
            with ThreadPoolExecutor(8) as pool:
                found = list(pool.map(lambda text: said(client, text), TEXTS))
            assert [answer is None for answer in found] == BAD
            assert [answer for answer in found if answer] == [
                answer for answer, bad in zip(before, BAD, strict=True) if not bad
            ]
        with ThreadPoolExecutor(8) as pool:
            warm = pool.submit(
                client.chat.completions.create, model=NAME, messages=[{"role": "user", "content": "one"}],
                temperature=1.2, seed=5, max_tokens=TOKENS,
            )  # fmt: skip
            beside = [pool.submit(said, client, text) for text in TEXTS]
            assert warm.result().choices[0].message.content == drawn.choices[0].message.content
            assert [each.result() is None for each in beside] == BAD
        events = [
            event.choices
            for text in ("one",)
            for event in client.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": text}], stream=True, max_tokens=TOKENS, temperature=0
            )
        ]
        assert "".join(choice.delta.content or "" for choices in events for choice in choices).strip() == before[0]
        with pytest.raises(openai.APIError, match="token 1 of the answer are not finite"):
            list(
                client.chat.completions.create(
                    model=NAME, messages=[{"role": "user", "content": "zebra"}], stream=True, max_tokens=TOKENS
                )
            )
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(not is_new_enough(), reason="this transformers is too old for it")
def test_a_model_without_end_tokens_by_continuous_batching(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "end_ids", [])
    with asking(engine_of(generator, "continuous")) as client:
        set_nan(generator.model.get_input_embeddings().weight, generator.tokenizer.encode("z")[0])
        assert [said(client, text) is None for text in TEXTS[:2]] == BAD[:2]


@pytest.mark.skipif(not is_new_enough(), reason="this transformers is too old for it")
def test_continuous_batching_does_not_begin_with_a_model_of_nan(generator: Generator) -> None:
    set_nan(generator.model.lm_head.weight)
    with pytest.raises(NotFiniteError, match=r"lm_head\.weight"):
        ContinuousWorker(generator, most_rows=2)


def test_pictures(tmp_path: Path) -> None:
    sampler, defaults = generate.load_generator(make_tiny_flux(tmp_path / "flux", identity_vae=True))
    with asking(DrawEngine(sampler, defaults)) as client:
        settings: dict[str, Any] = {"model": NAME, "prompt": "a cat", "size": "16x16"}
        assert client.images.generate(**settings, extra_body={"num_inference_steps": 1}).data
        set_nan(sampler.pipeline.transformer.proj_out.weight)
        with pytest.raises(openai.InternalServerError) as caught:
            client.images.generate(**settings, extra_body={"num_inference_steps": 1})
        assert caught.value.code == "not_finite" and "step 1 of 1" in caught.value.message


def test_transcripts(tmp_path: Path) -> None:
    generator = load_generator(make_whisper(tmp_path / "model"))
    with asking(AnswerEngine(generator)) as client:
        sound = ("a.wav", sound_bytes(tone(0.5, 16_000, 440.0), 16_000), "audio/wav")
        assert client.audio.transcriptions.create(model=NAME, file=sound) is not None
        set_nan(next(generator.model.model.encoder.parameters()))
        with pytest.raises(openai.InternalServerError) as caught:
            client.audio.transcriptions.create(model=NAME, file=sound)
        assert caught.value.code == "not_finite" and "'model.encoder." in caught.value.message


def test_commands_end_with_exit_code_4(tmp_path: Path, generator: Generator) -> None:
    folder = tmp_path / "nan"
    generator.model.save_pretrained(folder)
    for file in (tmp_path / "model").iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    rows = tmp_path / "rows.jsonl"
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": "x"}] for text in TEXTS]
    rows.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    assert mm("evaluate", folder, "--data", rows, "--out", tmp_path / "fine", "--max-new-tokens", 2).code == 0
    (folder / "model.safetensors").unlink()
    set_nan(generator.model.get_input_embeddings().weight, generator.tokenizer.encode("z")[0])
    generator.model.save_pretrained(folder)
    for words in (
        ("infer", folder, "--prompt", "zebra"),
        ("infer", folder, "--data", rows, "--out", tmp_path / "answers.jsonl"),
        ("evaluate", folder, "--data", rows, "--out", tmp_path / "scores"),
        ("evaluate", folder, "--loss", "--data", rows, "--out", tmp_path / "loss"),
    ):
        found = mm(*words)
        assert found.code == 4 and len(found.err.strip().splitlines()) <= 2, found
        assert "embed_tokens.weight" in found.err or "loss" in words[-1].name, found  # type: ignore[union-attr]
    assert not (tmp_path / "scores" / "results.json").exists() and not (tmp_path / "loss" / "loss.json").exists()
    kept = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(kept) == BAD.count(False)  # and the next command goes on from there
