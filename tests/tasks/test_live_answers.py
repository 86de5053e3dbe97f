"""Answers that are made together: each says what transformers says alone with its settings. Pieces of text, texts that
end an answer, thoughts and calls."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import LiveAnswer, TextPieces
from mindspeed_mm.fsdp.sampling.answers.questions import ask
from mindspeed_mm.fsdp.sampling.answers.spoken import SpokenPieces, take_apart, words_of
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.answer.generation import load_generator
from tests.helpers.greedy import greedy_answers
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_vl

WAIT_S = 60
TEXTS = ("zero", "which digit is this?", "one two three four five", "answer with one word", "seven", "ten nine 8")
SETTINGS = (
    Sampling(9, temperature=0),
    Sampling(7, temperature=1.5, seed=3),
    Sampling(12, temperature=0.7, top_p=0.8, seed=4),
    Sampling(5, top_k=5, seed=5),
    Sampling(8, temperature=1.0, min_p=0.02, repetition_penalty=1.7, seed=6),
    Sampling(6, temperature=0, repetition_penalty=1.9),
)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    folder = make_tiny_qwen3_vl(tmp_path_factory.mktemp("model"), seed=3, tie=False, initializer_range=0.4)
    return load_generator(folder)


@pytest.fixture(scope="module")
def questions(generator: Generator, tmp_path_factory: pytest.TempPathFactory) -> list[EncodedQuestion]:
    """Some with a picture, of different sizes, some without."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(3):
        Image.new("RGB", (32 + 16 * number, 48), (70 * number, 40, 9)).save(folder / f"{number}.png")
    media = [[MediaItem("image", f"{number}.png")] if number < 3 else [] for number in range(len(TEXTS))]
    asked = [ask(text, items).sample for text, items in zip(TEXTS, media, strict=True)]
    loader = generator.encoder.media(folder)
    return [generator.encoder.encode(sample, loader) for sample in asked]


def by_transformers(generator: Generator, question: EncodedQuestion, sampling: Sampling) -> tuple[int, ...]:
    """One answer by `generate` alone, sampling from torch's own stream."""
    inputs = generator.encoder.collate([question])
    names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
    asked = {name: value for field, name in names.items() if (value := getattr(sampling, field)) is not None}
    is_greedy = sampling.temperature == 0
    settings: dict[str, Any] = {"do_sample": False} if is_greedy else {"do_sample": True, **asked}
    if sampling.repetition_penalty:
        settings["repetition_penalty"] = sampling.repetition_penalty
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    with torch.inference_mode():
        ids = generator.model.generate(**inputs, max_new_tokens=sampling.max_new_tokens, **settings)
    return tuple(ids[0, inputs["input_ids"].shape[1] :].tolist())


def test_rows_with_settings_of_their_own_say_what_each_says_alone(
    generator: Generator, questions: Sequence[EncodedQuestion]
) -> None:
    rows = [LiveAnswer(question, sampling) for question, sampling in zip(questions, SETTINGS, strict=True)]
    together = [answer.token_ids for answer in generator.answer_live(rows)]
    alone = [by_transformers(generator, each, sampling) for each, sampling in zip(questions, SETTINGS, strict=True)]
    assert together == alone
    assert len({len(ids) for ids in together}) > 3  # each has its own longest answer


def test_what_the_generation_configuration_says_holds_unless_told_otherwise(
    generator: Generator, questions: Sequence[EncodedQuestion], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"do_sample": True, "temperature": 1.3, "top_k": 7, "top_p": 0.9, "repetition_penalty": 1.5}
    for name, value in said.items():
        monkeypatch.setattr(generator.model.generation_config, name, value)
    unset = Sampling(8, seed=11)
    rows = [LiveAnswer(question, unset) for question in questions]
    expected = [by_transformers_as_configured(generator, question, unset) for question in questions]
    assert [answer.token_ids for answer in generator.answer_live(rows)] == expected
    greedy = Sampling(8, temperature=0, repetition_penalty=1.0)
    (told,) = generator.answer_live([LiveAnswer(questions[0], greedy)])
    assert told.token_ids == by_transformers(generator, questions[0], greedy) != expected[0]


def by_transformers_as_configured(
    generator: Generator, question: EncodedQuestion, sampling: Sampling
) -> tuple[int, ...]:
    inputs = generator.encoder.collate([question])
    torch.manual_seed(sampling.seed or 0)
    with torch.inference_mode():
        ids = generator.model.generate(**inputs, max_new_tokens=sampling.max_new_tokens)
    return tuple(ids[0, inputs["input_ids"].shape[1] :].tolist())


def test_the_engine_joins_what_waits_and_says_the_same(
    generator: Generator, questions: Sequence[EncodedQuestion]
) -> None:
    engine = AnswerEngine(generator, most_rows=8)
    pairs = [(question, sampling) for sampling in SETTINGS for question in questions]
    futures = [engine.submit(LiveAnswer(*pair)) for pair in pairs]
    together = [future.result(WAIT_S).token_ids for future in futures]
    assert engine.counts.batches < len(pairs) / 3
    assert together == [by_transformers(generator, *pair) for pair in pairs]
    engine.close(WAIT_S)


def test_a_batch_has_no_more_tokens_than_it_may(generator: Generator, questions: Sequence[EncodedQuestion]) -> None:
    longest = max(len(question.input_ids) for question in questions)
    engine = AnswerEngine(generator, most_rows=8, most_tokens=2 * (longest + 4))
    rows = [LiveAnswer(question, Sampling(4, temperature=0)) for question in questions]
    assert not engine._fits(rows[:2], rows[2]) and engine._fits(rows[:1], rows[1])
    engine.close(WAIT_S)


def test_an_answer_that_nobody_waits_for_ends(generator: Generator, questions: Sequence[EncodedQuestion]) -> None:
    gone, stays = (LiveAnswer(question, Sampling(40, temperature=0)) for question in questions[:2])
    gone.tell = lambda _: gone.give_up()
    answers = generator.answer_live([gone, stays])
    assert gone.ending == "given up" and len(answers[0].token_ids) < 10
    assert answers[1].token_ids == by_transformers(generator, questions[1], stays.sampling)


def test_a_text_ends_an_answer(generator: Generator, questions: Sequence[EncodedQuestion]) -> None:
    (whole,) = generator.answer_live([LiveAnswer(questions[3], Sampling(30, temperature=0))])
    assert len(whole.text) > 6
    stop, pieces = whole.text[4:6], []
    row = LiveAnswer(questions[3], Sampling(30, temperature=0), pieces.append, ("nowhere at all", stop))
    (cut,) = generator.answer_live([row])
    expected = whole.text[: whole.text.index(stop)].strip()
    assert (cut.text, "".join(pieces), cut.finished) == (expected, expected, True)
    assert len(cut.token_ids) < len(whole.token_ids)


# --- pieces of text ---------------------------------------------------------------------------------------------------

SAID = "  Grüße, 日本語 🙂!\nA  second line.  \n"


def decode_bytes(token_ids: Sequence[int]) -> str:
    """Tokens are bytes."""
    return bytes(token_ids).decode("utf-8", "replace")


@pytest.mark.parametrize("stop", [(), ("second",), ("zz", "語 🙂!"), ("A  second line.  \n",)])
def test_pieces_make_up_the_text_and_tell_no_torn_character(stop: tuple[str, ...]) -> None:
    ids, told = list(SAID.encode()), []
    pieces = TextPieces(decode_bytes, told.append, stop)
    taken = next((n for n in range(1, len(ids) + 1) if pieces.take(ids[:n])), len(ids))
    text = pieces.close(ids[:taken], decode_bytes(ids[:taken]).strip())
    expected = min((SAID[: SAID.index(each)] for each in stop if each in SAID), key=len, default=SAID).strip()
    assert text == expected == "".join(told)
    assert "\ufffd" not in "".join(told) and len(told) > 5


def test_pieces_of_a_tokenizer_that_drops_the_first_blank() -> None:
    def decode(token_ids: Sequence[int]) -> str:
        return "".join([" a", " b", "c", " d"][token] for token in token_ids).removeprefix(" ")

    told: list[str] = []
    pieces = TextPieces(decode, told.append)
    for count in range(1, 5):
        pieces.take([0, 1, 2, 3][:count])
    assert (pieces.close([0, 1, 2, 3], "a bc d"), "".join(told)) == ("a bc d", "a bc d")


# --- thoughts and calls -----------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "thinks", "words", "thoughts", "calls"),
    [
        ("plain <b>words</b>", False, "plain <b>words</b>", "", 0),
        ("<think>why\nnot</think>\n\nyes", False, "yes", "why\nnot", 0),
        ("so it is</think>yes", True, "yes", "so it is", 0),
        ("<think>never ends", False, "", "never ends", 0),
        ("<thin ice", False, "<thin ice", "", 0),
        (f"<think>add</think>I add. {CALL}", False, "I add.", "add", 1),
        (f"{CALL}\n{CALL}", False, "", "", 2),
        ("<tool_call>{broken</tool_call>", False, "<tool_call>{broken</tool_call>", "", 0),
        ("a <think> later", False, "a <think> later", "", 0),
    ],
)
def test_an_answer_is_taken_apart(text: str, thinks: bool, words: str, thoughts: str, calls: int) -> None:
    whole = take_apart(text, thinks=thinks, calls=True)
    assert (whole.words, whole.thoughts, len(whole.calls)) == (words, thoughts, calls)
    if calls:
        assert whole.calls[0]["function"] == {"name": "add", "arguments": {"a": 1}}
    rng = random.Random(5)
    parts, said, place = SpokenPieces(thinks=thinks, calls=True), [], 0
    while place < len(text):
        step = rng.randint(1, 4)
        said += parts.take(text[place : place + step])
        place += step
    said += parts.close()
    joined = {kind: "".join(piece for each, piece in said if each == kind).strip() for kind in ("words", "thoughts")}
    assert (joined["words"], joined["thoughts"], len(parts.calls)) == (words, thoughts, calls)


def test_calls_are_words_where_no_tools_were_offered() -> None:
    assert take_apart(CALL).words == CALL


def test_tokens_are_taken_up_to_the_end() -> None:
    question = EncodedQuestion(np.zeros(3, np.int64), [])
    row = LiveAnswer(question, Sampling(5))
    assert [row.take(token, [7]) for token in (1, 7, 2)] == [False, True, True] and row.token_ids == [1, 7]


def test_what_was_partly_told_does_not_begin_again() -> None:
    row = LiveAnswer(EncodedQuestion(np.zeros(3, np.int64), []), Sampling(5), lambda _: None)
    row.begin(decode_bytes)
    row.take(65, [])
    with pytest.raises(RuntimeError, match="cannot start again"):
        row.begin(decode_bytes)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (" B ", " B "), ("<think></think>\nfour five", "four five"), ("hm, A?</think>\n\nB", "B"),
        ("<think>on and on", ""), ("a < b", "a < b"), ("", ""),
    ],
)  # fmt: skip
def test_what_is_compared_has_no_thoughts(said: str, words: str) -> None:
    assert words_of(said) == words


@pytest.mark.parametrize("configured", [False, True])
def test_beams_find_what_transformers_finds(
    generator: Generator, questions: Sequence[EncodedQuestion], monkeypatch: pytest.MonkeyPatch, configured: bool
) -> None:
    greedy = [answer.token_ids for answer in greedy_answers(generator, questions, 8)]
    expected = []
    for question in questions:
        inputs = generator.encoder.collate([question])
        with torch.inference_mode():
            ids = generator.model.generate(**inputs, max_new_tokens=8, num_beams=3, do_sample=False)
        expected.append(tuple(ids[0, inputs["input_ids"].shape[1] :].tolist()))
    if configured:
        monkeypatch.setattr(generator.model.generation_config, "num_beams", 3)
    asked = Sampling(8, temperature=0, beams=None if configured else 3)
    found = [answer.token_ids for answer in generator.answer_live([LiveAnswer(each, asked) for each in questions])]
    assert found == expected != greedy


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rows_do_not_change_the_positions_of_their_neighbours(kind: str, tmp_path: Path) -> None:
    """Whose frequencies transformers takes from the longest row of a pass."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    if kind == "longrope":
        half = 8
        rope |= {"short_factor": [1.0] * half, "long_factor": [3.0] * half, "original_max_position_embeddings": 48}
    longest = 192 if kind == "longrope" else 48
    folder = make_tiny_qwen3(
        tmp_path, seed=3, initializer_range=0.4, rope_parameters=rope, max_position_embeddings=longest
    )
    generator = load_generator(folder)
    texts = ["why?", "one two " * 20, "who is it? " * 3, "no " * 30]
    rows = [generator.encode(ask(text, []).sample, generator.encoder.media(tmp_path)) for text in texts]
    together = greedy_answers(generator, rows, 12)
    alone = [greedy_answers(generator, [row], 12)[0] for row in rows]
    assert together == alone
    generator.longest_alike = None
    assert greedy_answers(generator, rows, 12) != alone
