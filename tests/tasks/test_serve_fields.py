"""Fields of requests do what OpenAI's interface and vLLM say they do, by the numbers of plain transformers; what the
engine cannot do is refused by name."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI

from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.tasks.answer.continuous import ContinuousWorker, is_new_enough
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.answer.generation import load_generator
from tests.helpers.served import NAME, served
from tests.helpers.tiny_models import CHAT_TEMPLATE, make_tiny_qwen3

TOKENS = 10
ASKED = [{"role": "user", "content": "one two"}]
THINKS = "{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think></think>' -}}{%- endif -%}"
pytestmark = pytest.mark.edge("BR17")
Scores = Any


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_qwen3(tmp_path_factory.mktemp("model"), seed=3, initializer_range=0.4)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + THINKS)
    return folder


@pytest.fixture(scope="module")
def generator(folder: Path) -> Generator:
    return load_generator(folder)


@pytest.fixture(scope="module", params=["batches", "continuous"])
def client(folder: Path, generator: Generator, request: pytest.FixtureRequest) -> Iterator[OpenAI]:
    if request.param == "batches":
        engine = AnswerEngine(generator)
    elif is_new_enough():
        own = load_generator(folder)
        engine = AnswerEngine(own, worker=ContinuousWorker(own, most_rows=8))
    else:
        pytest.skip("this transformers is too old for it")
    with served(engine) as address:
        yield OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


@cache
def loaded(folder: Path) -> tuple[Any, Any]:
    """A tokenizer and a model by plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()


def prompt_of(folder: Path, **variables: Any) -> list[int]:
    tokenizer, _ = loaded(folder)
    ids: list[int] = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, **variables)["input_ids"]
    return ids


def by_hand(folder: Path, prompt: list[int], change: Any, count: int = TOKENS) -> tuple[list[int], torch.Tensor]:
    """The likeliest tokens of plain forward passes whose scores are changed by a formula of the answer so far, and the
    log-probabilities of the scores as they were."""
    _, model = loaded(folder)
    ids, rows = list(prompt), []
    for _ in range(count):
        with torch.inference_mode():
            scores_V = model(input_ids=torch.tensor([ids])).logits[0, -1].float()
        rows.append(scores_V.log_softmax(-1))
        ids.append(int(change(scores_V.clone(), ids[len(prompt) :]).argmax()))
    return ids[len(prompt) :], torch.stack(rows)


def penalised(scores_V: Scores, answer: list[int], frequency: float, presence: float) -> Scores:
    for token in set(answer):
        scores_V[token] -= frequency * answer.count(token) + presence
    return scores_V


def text_of(folder: Path, ids: list[int]) -> str:
    return str(loaded(folder)[0].decode(ids, skip_special_tokens=True)).strip()


def ask(client: OpenAI, **fields: Any) -> Any:
    usual: dict[str, Any] = {"model": NAME, "messages": ASKED, "temperature": 0, "max_tokens": TOKENS}
    known = {
        name: fields.pop(name)
        for name in ("top_k", "repetition_penalty", "ignore_eos", "chat_template_kwargs")
        if name in fields
    }
    return client.chat.completions.create(**{**usual, **fields}, extra_body=known)


def said(client: OpenAI, **fields: Any) -> str | None:
    text: str | None = ask(client, **fields).choices[0].message.content
    return text


def refused(client: OpenAI, **fields: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert caught.value.code in ("unsupported_value", "invalid_value", "unknown_parameter")
    return caught.value


@pytest.mark.parametrize(("frequency", "presence"), [(2.0, 0.0), (0.0, 2.0), (1.3, 0.7), (-2.0, -2.0)])
def test_penalties_are_the_formula(client: OpenAI, folder: Path, frequency: float, presence: float) -> None:
    """The question's tokens do not count."""
    prompt = prompt_of(folder)
    expected, _ = by_hand(folder, prompt, lambda scores, answer: penalised(scores, answer, frequency, presence))
    assert said(client, frequency_penalty=frequency, presence_penalty=presence) == text_of(folder, expected)
    plain, _ = by_hand(folder, prompt, lambda scores, _: scores)
    assert said(client, frequency_penalty=0, presence_penalty=0) == text_of(folder, plain)
    assert frequency < 0 or expected != plain


def test_biases_are_added(client: OpenAI, folder: Path) -> None:
    prompt = prompt_of(folder)
    (first, *_), _ = by_hand(folder, prompt, lambda scores, _: scores)

    def biased(scores_V: Scores, _: list[int]) -> Scores:
        scores_V[first] -= 100
        scores_V[33] += 1.5
        return scores_V

    expected, _ = by_hand(folder, prompt, biased)
    assert first not in expected
    assert said(client, logit_bias={str(first): -100, "33": 1.5}) == text_of(folder, expected)
    assert "there is no token 99999" in refused(client, logit_bias={"99999": 1}).message


def test_log_probabilities_are_those_of_a_plain_pass(client: OpenAI, folder: Path) -> None:
    """Of the model, whatever penalties and temperature do."""
    prompt = prompt_of(folder)
    settings: list[dict[str, Any]] = [{}, {"frequency_penalty": 1.5}, {"temperature": 1.3, "seed": 4}]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda each: ask(client, logprobs=True, top_logprobs=3, **each), settings))
    tokenizer, _ = loaded(folder)
    for answer in found:
        content = answer.choices[0].logprobs.content
        assert len(content) == answer.usage.completion_tokens
        ids = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(each.token)) for each in content]
        assert "".join(each.token for each in content).strip() == answer.choices[0].message.content or len(ids)
    for change, answer in zip(
        (lambda scores, _: scores, lambda scores, said: penalised(scores, said, 1.5, 0)), found[:2], strict=True
    ):
        expected, log_probs = by_hand(folder, prompt, change)
        content = answer.choices[0].logprobs.content
        for place, (token, each) in enumerate(zip(expected, content, strict=True)):
            assert each.token == tokenizer.decode([token]) and bytes(each.bytes).decode() == each.token
            assert each.logprob == pytest.approx(float(log_probs[place, token]), abs=1e-4)
            top = log_probs[place].topk(3)
            assert [other.logprob for other in each.top_logprobs] == pytest.approx(top.values.tolist(), abs=1e-4)
            assert [other.token for other in each.top_logprobs] == [tokenizer.decode([i]) for i in top.indices.tolist()]
    assert ask(client).choices[0].logprobs is None
    assert ask(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert "leave 'stream' out" in refused(client, logprobs=True, stream=True).message
    assert refused(client, top_logprobs=2).param == "top_logprobs"


def test_values_that_ask_for_nothing(client: OpenAI) -> None:
    greedy = said(client)
    assert said(client, top_p=0, temperature=1.5) == greedy  # the likeliest token alone
    assert said(client, seed=-1) == greedy
    warm: dict[str, Any] = {"temperature": 1.5, "seed": 3}
    assert said(client, top_k=-1, **warm) == said(client, top_k=0, **warm)
    assert {said(client, temperature=1.5, seed=-1, top_k=-1) for _ in range(4)} != {greedy}
    for harmless in ({"tool_choice": "auto"}, {"parallel_tool_calls": True}, {"store": False}, {"n": 1}):
        assert said(client, **harmless) == greedy


def test_several_answers(client: OpenAI) -> None:
    alone = [said(client, temperature=1.4, seed=5 + number) for number in range(3)]
    whole = ask(client, temperature=1.4, seed=5, n=3)
    assert [choice.message.content for choice in whole.choices] == alone and len(set(alone)) > 1
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage.completion_tokens == 3 * TOKENS and whole.usage.prompt_tokens == ask(client).usage.prompt_tokens
    pieces, ended = {0: "", 1: "", 2: ""}, []
    for chunk in ask(client, temperature=1.4, seed=5, n=3, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
            ended += [choice.index] if choice.finish_reason else []
    assert [pieces[number] for number in range(3)] == alone and sorted(ended) == [0, 1, 2]
    with pytest.raises(openai.APIStatusError, match="--max-samples"):
        ask(client, n=5)


def test_an_end_that_is_ignored(generator: Generator, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(folder)
    expected, _ = by_hand(folder, prompt, lambda scores, _: scores)
    end = next(token for token in expected[2:] if token not in expected[:2])
    monkeypatch.setattr(generator, "end_ids", [end])
    workers = [None, ContinuousWorker(generator, most_rows=4)] if is_new_enough() else [None]
    for worker in reversed(workers):
        with served(AnswerEngine(generator, worker=worker)) as address:
            client = OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
            with ThreadPoolExecutor(2) as pool:  # beside one that ends
                ending, going = pool.submit(ask, client), pool.submit(ask, client, ignore_eos=True)
            assert ending.result().choices[0].finish_reason == "stop"
            assert ending.result().usage.completion_tokens == expected.index(end) + 1
            assert going.result().usage.completion_tokens == TOKENS
            assert going.result().choices[0].message.content == text_of(folder, expected)


def test_variables_of_the_chat_template(client: OpenAI, folder: Path) -> None:
    prompt = prompt_of(folder, enable_thinking=False)
    assert prompt != prompt_of(folder)
    expected, _ = by_hand(folder, prompt, lambda scores, _: scores)
    answer = ask(client, chat_template_kwargs={"enable_thinking": False})
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].message.content == text_of(folder, expected)
    error = refused(client, chat_template_kwargs={"no_such": 1})
    assert error.param == "chat_template_kwargs.no_such" and "reads no 'no_such'" in error.message
    assert refused(client, reasoning_effort="low").param == "reasoning_effort"
    assert refused(client, chat_template_kwargs={"messages": []}).param == "chat_template_kwargs.messages"


def test_completions_go_on_with_a_text(client: OpenAI, folder: Path) -> None:
    tokenizer, _ = loaded(folder)
    texts = ["one two three", "hello"]
    expected = [by_hand(folder, tokenizer(text)["input_ids"], lambda scores, _: scores) for text in texts]
    whole = client.completions.create(model=NAME, prompt=texts, temperature=0, max_tokens=TOKENS, logprobs=2)
    for choice, (ids, log_probs) in zip(whole.choices, expected, strict=True):
        assert choice.text == tokenizer.decode(ids, skip_special_tokens=True) and choice.finish_reason == "length"
        values = [float(log_probs[place, token]) for place, token in enumerate(ids)]
        assert choice.logprobs is not None and choice.logprobs.token_logprobs == pytest.approx(values, abs=1e-4)
        assert choice.logprobs.tokens == [tokenizer.decode([token]) for token in ids]
        assert choice.logprobs.top_logprobs and len(choice.logprobs.top_logprobs[0]) <= 2
    ids = tokenizer(texts[0])["input_ids"]
    by_ids = client.completions.create(model=NAME, prompt=ids, temperature=0, max_tokens=TOKENS)
    assert by_ids.choices[0].text == whole.choices[0].text and by_ids.object == "text_completion"
    assert by_ids.usage is not None and by_ids.usage.prompt_tokens == len(ids)
    pieces = ["", ""]
    for chunk in client.completions.create(model=NAME, prompt=texts, temperature=0, max_tokens=TOKENS, stream=True):
        for part in chunk.choices:
            pieces[part.index] += part.text
    assert pieces == [choice.text for choice in whole.choices]
    wrong: list[dict[str, Any]] = [
        {"prompt": []}, {"prompt": ""}, {"prompt": [[]]}, {"prompt": [99999]}, {"echo": True}, {"suffix": "x"},
        {"best_of": 2}, {"logprobs": 9}, {"extra_body": {"top_n": 1}},
    ]  # fmt: skip
    for fields in wrong:
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**{"model": NAME, "prompt": "x", **fields})


def test_what_is_not_built_is_refused_by_name(client: OpenAI) -> None:
    for fields in ({"tool_choice": "required"}, {"parallel_tool_calls": False}, {"store": True}):
        (name,) = fields
        error = refused(client, **fields)
        assert error.param == name and f"'{name}'" in error.message and "Leave it out" in error.message
    for path in ("responses", "embeddings", "images/edits", "audio/speech", "moderations"):
        with pytest.raises(openai.BadRequestError, match=f"'/v1/{path}' is not supported: "):
            client.post(f"/{path}", cast_to=object, body={"model": NAME, "input": "x"})


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def formats(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="llguidance is not installed")
def test_answers_follow_a_schema(client: OpenAI) -> None:
    def of_schema(seed: int) -> Any:
        return json.loads(said(client, response_format=formats(SCHEMA), temperature=1, seed=seed, max_tokens=200) or "")

    with ThreadPoolExecutor(5) as pool:
        plain = pool.submit(said, client)
        found = list(pool.map(of_schema, range(4)))
    assert plain.result() == said(client)
    for each in found:
        assert set(each) == {"name", "age"} and len(each["name"]) <= 5 and 0 <= each["age"] <= 99
    answer = ask(client, response_format=formats(SCHEMA), max_tokens=200, logit_bias={})
    assert answer.choices[0].finish_reason == "stop"
    choice = ask(client, response_format={"type": "json_object"}, max_tokens=40, seed=1, temperature=1).choices[0]
    assert choice.message.content.startswith("{")
    assert "response_format" in str(refused(client, response_format=formats({"type": "no such type"})).param)
    assert said(client, response_format={"type": "text"}) == said(client)


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="llguidance is not installed")
@pytest.mark.parametrize("kind", ["batches", "continuous"])
def test_an_answer_that_no_token_goes_on_is_refused_alone(kind: str, tmp_path: Path) -> None:
    """llguidance ends such an answer where it stands; it came as "" or a half, with the reason `stop`."""
    if kind == "continuous" and not is_new_enough():
        pytest.skip("this transformers is too old for it")
    folder = make_tiny_qwen3(tmp_path / "model", seed=3, initializer_range=0.4)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    assert text.count('"~": ') == 1
    (folder / "tokenizer.json").write_text(text.replace('"~": ', '"never said": '), encoding="utf-8")
    generator = load_generator(folder)
    worker = ContinuousWorker(generator, most_rows=8) if kind == "continuous" else None
    with served(AnswerEngine(generator, worker=worker)) as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        alone = said(client, max_tokens=40)
        with ThreadPoolExecutor(4) as pool:
            beside = pool.submit(said, client, max_tokens=40)
            for value in ("~", "a~b"):
                error = refused(client, response_format=formats({"const": value}), max_tokens=40)
                assert error.param == "response_format" and "no answer fits the schema" in error.message
        assert beside.result() == alone
        assert said(client, response_format=formats({"const": "ab"}), max_tokens=40) == '"ab"'


def test_a_schema_without_the_library_is_refused(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_mm.fsdp.sampling.answers.steering.find_spec", lambda _: None)
    for asked in ({"type": "json_object"}, formats(SCHEMA)):
        with pytest.raises(openai.InternalServerError) as caught:
            said(client, response_format=asked)
        error = caught.value
        assert (error.status_code, error.param, error.code) == (501, "response_format", "unavailable")
        assert "llguidance" in error.message and "mindspeed-mm[serve]" in error.message


def test_a_model_that_searches_beams_says_that_nothing_is_drawn(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "model")
    saved = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**saved, "num_beams": 2}))
    with served(AnswerEngine(load_generator(folder))) as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        assert said(client) is not None
        for fields in ({"temperature": 1}, {"frequency_penalty": 1}, {"logprobs": True}, {"n": 2}):
            assert "searches 2 beams" in refused(client, **fields).message
