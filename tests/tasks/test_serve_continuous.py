"""`mm serve` by transformers' continuous batching: the tokens of plain `generate`, clients that leave, failures, an end
that finishes what runs, and models that it is not for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import LiveAnswer
from mindspeed_mm.fsdp.sampling.answers.questions import ask
from mindspeed_mm.tasks.answer import continuous
from mindspeed_mm.tasks.answer.continuous import ContinuousWorker, is_new_enough
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.answer.generation import load_generator, load_model
from mindspeed_mm.tasks.requests.serve import ServeRequest, check_request
from mindspeed_mm.tasks.serve import serve
from mindspeed_mm.tasks.serve.limits import Limits
from tests.helpers.served import NAME, served
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_moe, make_tiny_qwen3_vl

TOKENS = 12
WAIT_S = 20.0
ASKED = [f"{'one two ' * (number % 7)}{number}?" for number in range(12)]

pytestmark = pytest.mark.skipif(not is_new_enough(), reason="this transformers is too old for it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), seed=3, initializer_range=0.4)


@pytest.fixture(scope="module")
def generator(folder: Path) -> Generator:
    return load_generator(folder)


@pytest.fixture
def worker(generator: Generator) -> Iterator[ContinuousWorker]:
    worker = ContinuousWorker(generator, most_rows=8)
    yield worker
    worker.close(0)


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """On a model of its own: while a worker answers, nobody else may use its model."""
    generator = load_generator(folder)
    with served(AnswerEngine(generator, worker=ContinuousWorker(generator, most_rows=8))) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


@cache
def loaded(folder: Path) -> tuple[Any, Any]:
    """A tokenizer and a model by plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()


def by_transformers(folder: Path, text: str, **settings: Any) -> list[int]:
    """The tokens of an answer by plain transformers."""
    tokenizer, model = loaded(folder)
    turns = [{"role": "user", "content": text}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.manual_seed(settings.pop("seed", 0))
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=TOKENS, **settings)[0]
    found: list[int] = ids[inputs["input_ids"].shape[1] :].tolist()
    return found


def row_of(generator: Generator, text: str, sampling: Sampling, **fields: Any) -> LiveAnswer:
    media = generator.encoder.media(Path.cwd())
    return LiveAnswer(generator.encode(ask(text, []).sample, media), sampling, **fields)


def eventually(holds: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + WAIT_S
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.01)
    return holds()


def test_tokens_are_those_of_plain_generate(worker: ContinuousWorker, generator: Generator, folder: Path) -> None:
    """Twelve questions for eight places, of lengths of their own: later ones join what is running."""
    rows = [row_of(generator, text, Sampling(TOKENS, temperature=0)) for text in ASKED]
    futures = [worker.submit(row) for row in rows]
    found = [list(future.result(WAIT_S).token_ids) for future in futures]
    assert found == [by_transformers(folder, text, do_sample=False) for text in ASKED]
    assert len({tuple(tokens) for tokens in found}) > len(ASKED) // 2
    assert (worker.waiting, worker.counts.running, worker.counts.jobs) == (0, 0, len(ASKED))
    assert TOKENS <= worker.counts.batches < len(ASKED) * TOKENS  # rows shared passes


def test_each_row_has_settings_of_its_own(worker: ContinuousWorker, generator: Generator, folder: Path) -> None:
    settings: list[dict[str, Any]] = [
        {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 5},
        {"do_sample": False},
        {"do_sample": True, "temperature": 1.5, "top_k": 7, "top_p": 0.9, "seed": 6},
        {"do_sample": True, "temperature": 1.0, "top_k": 50, "min_p": 0.05, "seed": 7},
        {"do_sample": False, "repetition_penalty": 1.8},
        {"do_sample": False, "repetition_penalty": 0.5},
        {"do_sample": False, "repetition_penalty": 6.0},
        {"do_sample": False, "repetition_penalty": 0.7},
    ]
    futures = []
    for text, asked in zip(ASKED, settings, strict=False):
        chosen = {name: value for name, value in asked.items() if name != "do_sample"}
        chosen.setdefault("temperature", 0)
        futures.append(worker.submit(row_of(generator, text, Sampling(TOKENS, **chosen))))
    for text, asked, future in zip(ASKED, settings, futures, strict=False):
        assert list(future.result(WAIT_S).token_ids) == by_transformers(folder, text, **asked), asked


def test_a_question_that_is_read_in_parts(generator: Generator, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And more answers than the cache has room for: some are begun again."""
    monkeypatch.setattr(continuous, "STEP_TOKENS", 16)
    monkeypatch.setattr(continuous, "_PAGE_TOKENS", 8)
    worker = ContinuousWorker(generator, most_rows=4, most_tokens=64)
    try:
        settings: list[dict[str, Any]] = [
            {"temperature": 1.0, "top_k": 0, "seed": number}  # a draw for a part of the question would be seen
            if number % 2
            else {"temperature": 0, "repetition_penalty": 0.5 + number / 8}
            for number in range(len(ASKED))
        ]
        futures = []
        for text, chosen in zip(ASKED, settings, strict=True):
            futures.append(worker.submit(row_of(generator, text, Sampling(TOKENS, **chosen))))
        found = [list(future.result(WAIT_S).token_ids) for future in futures]
    finally:
        worker.close(0)
    for text, chosen, tokens in zip(ASKED, settings, found, strict=True):
        if not chosen["temperature"]:
            chosen = {"repetition_penalty": chosen["repetition_penalty"]}
        assert tokens == by_transformers(folder, text, do_sample="seed" in chosen, **chosen), text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["experts", "a window", "adapters", "bfloat16"])
def test_other_models(kind: str, tmp_path: Path) -> None:
    """A mixture of experts, layers that see the last tokens alone, adapters beside the weights, short floats."""
    wide: dict[str, Any] = {"seed": 3, "initializer_range": 0.4}
    window = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    lora = None
    if kind == "experts":
        folder = make_tiny_qwen3_moe(tmp_path / "model", **wide)
    elif kind == "a window":
        folder = make_tiny_qwen3(tmp_path / "model", **wide, **window)
    else:
        folder = make_tiny_qwen3(
            tmp_path / "model", **wide, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32
        )
    if kind == "adapters":
        import peft  # after torchvision is made importable

        lora = tmp_path / "lora"
        torch.manual_seed(0)
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        peft.get_peft_model(load_model(folder), settings).save_pretrained(lora)
    generator = load_generator(folder, lora)
    rows = [row_of(generator, text, Sampling(TOKENS, temperature=0)) for text in ASKED]
    expected = [list(answer.token_ids) for answer in generator.answer_live(rows)]
    worker = ContinuousWorker(generator, most_rows=4)
    found = [list(worker.submit(row).result(WAIT_S).token_ids) for row in rows]
    together = [worker.submit(row_of(generator, text, Sampling(TOKENS, temperature=0))) for text in ASKED]
    found_together = [list(future.result(WAIT_S).token_ids) for future in together]
    worker.close(0)
    if kind == "bfloat16":  # rounding decides between tokens that are all but equally likely
        agree = sum(one == two for one, two in zip(found, expected, strict=True))
        assert agree >= len(ASKED) - 2
        return
    assert found == found_together == expected
    again = [row_of(generator, text, Sampling(TOKENS, temperature=0)) for text in ASKED]
    assert [list(answer.token_ids) for answer in generator.answer_live(again)] == expected  # it left nothing behind


def test_clients_are_answered_as_by_batches(client: OpenAI, generator: Generator) -> None:
    with served(AnswerEngine(generator)) as other:
        batches = OpenAI(base_url=f"{other}/v1", api_key="any", max_retries=0)
        asked: dict[str, Any] = {
            "model": NAME, "messages": [{"role": "user", "content": ASKED[3]}], "temperature": 0, "max_tokens": TOKENS,
        }  # fmt: skip
        whole = batches.chat.completions.create(**asked)
        said = whole.choices[0].message.content
        assert said and client.chat.completions.create(**asked).choices[0].message.content == said
        chunks = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
        pieces, last = "", None
        for last in chunks:
            pieces += "".join(choice.delta.content or "" for choice in last.choices)
        assert pieces == said and last is not None and last.usage == whole.usage

        stop = said[len(said) // 2 :][:2]
        short = [each.chat.completions.create(stop=[stop], **asked).choices[0] for each in (client, batches)]
        assert short[0].message.content == short[1].message.content != said
        assert short[0].finish_reason == short[1].finish_reason == "stop"

        drawn = {**asked, "temperature": 1.3, "seed": 11}
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda each: each.chat.completions.create(**drawn), [client] * 8))
        expected = batches.chat.completions.create(**drawn).choices[0].message.content
        assert {each.choices[0].message.content for each in found} == {expected} != {said}


def test_who_leaves_frees_the_place(
    worker: ContinuousWorker, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running or waiting; nothing is computed for them any more."""
    monkeypatch.setattr(generator, "end_ids", [])
    rows = [row_of(generator, "hello", Sampling(4000, temperature=0)) for _ in range(9)]  # for eight places
    futures = [worker.submit(row) for row in rows]
    assert eventually(lambda: worker.counts.running == 8) and worker.waiting == 1
    assert futures[8].cancel() and worker.waiting == 0
    for row in rows[:8]:
        row.give_up()
    assert all(not future.result(WAIT_S).finished for future in futures[:8])
    assert [row.ending for row in rows[:8]] == ["given up"] * 8 and len(rows[0].token_ids) < 4000
    time.sleep(0.2)
    passes = worker.counts.batches
    time.sleep(0.2)
    assert worker.counts.batches == passes
    assert len(worker.submit(row_of(generator, "hello", Sampling(3))).result(WAIT_S).token_ids) == 3


def test_a_pass_that_fails_is_told_and_the_next_question_answered(
    worker: ContinuousWorker, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, failures = generator.model, [MemoryError("no more")]
    plain = model.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return plain(*arguments, **named)

    monkeypatch.setattr(model, "forward", forward)
    futures = [worker.submit(row_of(generator, text, Sampling(3, temperature=0))) for text in ASKED[:3]]
    told = [type(future.exception(WAIT_S)) for future in futures]
    assert set(told) <= {MemoryError, RuntimeError, type(None)} and told[0] is not type(None)
    row = row_of(generator, "hello", Sampling(3, temperature=0))
    assert len(worker.submit(row).result(WAIT_S).token_ids) == 3
    assert (worker.waiting, worker.counts.running) == (0, 0)


def test_the_end_finishes_what_runs(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "end_ids", [])
    worker = ContinuousWorker(generator, most_rows=2)
    futures = [worker.submit(row_of(generator, text, Sampling(TOKENS, temperature=0))) for text in ASKED[:5]]
    worker.close(WAIT_S)
    assert all(len(future.result(0).token_ids) == TOKENS for future in futures)
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(row_of(generator, "hello", Sampling(3)))

    worker = ContinuousWorker(generator, most_rows=2)
    slow = worker.submit(row_of(generator, "hello", Sampling(10**6, temperature=0)))
    before_s = time.monotonic()
    worker.close(0)
    assert time.monotonic() - before_s < WAIT_S / 2 and slow.done()


def test_models_that_it_is_not_for(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**changes: Any) -> str:
        request = ServeRequest(**{"model": folder, "engine": "continuous", **changes})
        with pytest.raises(MMError) as caught:
            check_request(request)
            with serve.engine_of(request):
                pass
        (problem,) = caught.value.problems
        assert problem.key == "--engine" and problem.way_out
        return problem.what

    with monkeypatch.context() as patched:
        patched.setattr(continuous, "_NEEDS_TRANSFORMERS", "99.1")
        assert "needs transformers 99.1" in refused()
    assert "pictures" in refused(model=make_tiny_qwen3_vl(tmp_path / "sees"))
    assert "adapters" in refused(adapters=(f"kind={tmp_path / 'none'}",))
    searches = make_tiny_qwen3(tmp_path / "searches")
    (searches / "generation_config.json").write_text(json.dumps({"num_beams": 2, "no_repeat_ngram_size": 3}))
    assert "no_repeat_ngram_size, num_beams" in refused(model=searches)
    stretched = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    assert "longest row of a pass, behind 48 tokens" in refused(
        model=make_tiny_qwen3(tmp_path / "stretched", rope_parameters=stretched, max_position_embeddings=48)
    )
    saved = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(
        json.dumps({**saved, "output_attentions": False})
    )  # transformers 5.23
    with serve.engine_of(ServeRequest(folder, engine="continuous")):
        pass
    with monkeypatch.context() as patched:  # a layer that reads positions of its own
        patched.setattr(
            "transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding.forward", _without_positions(folder)
        )
        assert "not those of a plain pass" in refused()


def _without_positions(folder: Path) -> Any:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    plain = Qwen3RotaryEmbedding.forward

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return plain(self, x, torch.arange(x.shape[1])[None] + 0 * position_ids)

    return forward


@pytest.mark.parametrize(
    ("device", "engine", "is_continuous"),
    [("cpu", "own", False), ("cuda", "own", True), ("cuda", "batches", False), ("cpu", "continuous", True)],
)
def test_which_way_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: str, engine: str, is_continuous: bool
) -> None:
    monkeypatch.setattr(serve, "get_device_type", lambda: device)
    request = ServeRequest(folder, engine=engine, batch_size=2, limits=Limits(max_prompt_tokens=64, max_new_tokens=64))
    with serve.engine_of(request) as found:
        assert isinstance(found, AnswerEngine)
        assert isinstance(found._worker, ContinuousWorker) is is_continuous


def test_a_model_that_takes_pictures_is_answered_by_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "get_device_type", lambda: "cuda")
    with serve.engine_of(ServeRequest(make_tiny_qwen3_vl(tmp_path / "sees"))) as found:
        assert isinstance(found, AnswerEngine) and not isinstance(found._worker, ContinuousWorker)
