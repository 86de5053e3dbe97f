"""`mm chat`: turns as plain transformers would answer them, what a slash does, and what goes wrong."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image

from mindspeed_mm.cli.chat import COMMANDS, command, obey
from mindspeed_mm.cli.main import run
from mindspeed_mm.core.errors import DataError, MachineError, UsageError
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.answers.questions import read_questions
from mindspeed_mm.tasks.answer.conversation import begin
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.answer.remote import RemoteModel
from mindspeed_mm.tasks.requests.serve import Access
from tests.helpers.hostile import BEHAVIOURS, Hostile, hostile
from tests.helpers.served import served
from tests.helpers.tiny_models import make_tiny_qwen3_vl

TOKENS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_vl(tmp_path_factory.mktemp("model"), tie=False, initializer_range=0.4)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a three.png"
    Image.new("RGB", (32, 48), (200, 40, 9)).save(path)
    return path


def chatted(folder: Path | str, *lines: str, options: tuple[str, ...] = ("--temperature", "0")) -> Result:
    words = [str(folder), "--max-new-tokens", str(TOKENS), *options]
    result = CliRunner().invoke(command, words, input="".join(f"{line}\n" for line in lines), catch_exceptions=False)
    assert result.exit_code == 0
    return result


def by_transformers(folder: Path, turns: list[dict[str, Any]], pictures: list[Any]) -> str:
    from transformers import AutoModelForImageTextToText, AutoProcessor  # after torchvision is made importable

    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    text = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], images=pictures or None, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    said: str = processor.tokenizer.decode(ids, skip_special_tokens=True)
    return said.strip()


def as_shown(text: str) -> str:
    """As a terminal shows it: this tiny model says control characters."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def test_three_turns_with_a_picture_in_the_second(folder: Path, picture: Path, tmp_path: Path) -> None:
    saved = tmp_path / "out/chats.jsonl"
    lines = (
        "hello",
        f"/image {picture}",
        "what is this?",
        "and why?",
        f"/save {saved}",
        f"/save '{saved}'",
        "/exit",
        "x",
    )
    output = chatted(folder, *lines).output.splitlines()
    row = json.loads(saved.read_text().splitlines()[0])
    said = [turn["content"] for turn in row["messages"] if turn["role"] == "assistant"]
    assert len(said) == 3 and any(said) and len(saved.read_text().splitlines()) == 2
    shown = Image.open(picture)
    asked = [{"type": "image"}, {"type": "text", "text": "what is this?"}]
    turns: list[dict[str, Any]] = []
    for content, pictures, answer in (
        ("hello", [], said[0]),
        (asked, [shown], said[1]),
        ("and why?", [shown], said[2]),
    ):
        turns.append({"role": "user", "content": content})
        assert by_transformers(folder, turns, pictures) == answer
        turns.append({"role": "assistant", "content": answer})
        assert as_shown(answer) in "\n".join(output)
    assert row["images"] == [str(picture)] and row["messages"][2]["content"] == "<image>what is this?"
    (question, _) = read_questions(saved, needs_answers=True)
    assert (question.text, question.expected, question.images) == ("and why?", said[2], [str(picture)])


def test_pieces_are_told_while_they_are_made(folder: Path) -> None:
    chat, pieces = begin(folder, Sampling(TOKENS, temperature=0)), []
    answer = chat.say("hello", pieces.append)
    assert "".join(pieces) == answer.text and len([piece for piece in pieces if piece]) > 1


def test_sampling_is_what_is_asked_for(folder: Path) -> None:
    chat = begin(folder, Sampling())

    def said(**settings: Any) -> str:
        chat.reset()
        chat.sampling = Sampling(12, **settings)
        return chat.say("hello", lambda _: None).text

    greedy = said(temperature=0)
    assert said(temperature=0, seed=3) == greedy
    warm = {said(temperature=2.0, seed=seed) for seed in range(4)}
    assert len(warm) > 1 and said(temperature=2.0, seed=1) == said(temperature=2.0, seed=1)
    assert said(temperature=2.0, top_p=1e-6, seed=5) == greedy


def test_the_system_prompt_and_new_beginnings(folder: Path) -> None:
    chat = begin(folder, Sampling(TOKENS, temperature=0), system="Be brief.")
    first = chat.say("hello", lambda _: None).text
    assert chat.row()["messages"][0] == {"role": "system", "content": "Be brief."}
    chat.say("more", lambda _: None)
    assert obey(chat, "/reset") == "a new conversation" and chat.turns == []
    assert chat.say("hello", lambda _: None).text == first
    obey(chat, "/system Be long, very long.")
    assert (chat.system, chat.turns) == ("Be long, very long.", [])


def test_mistakes_are_told_and_the_conversation_goes_on(folder: Path, picture: Path, tmp_path: Path) -> None:
    torn, other = tmp_path / "torn.png", tmp_path / "notes.txt"
    torn.write_bytes(picture.read_bytes()[:40])
    other.write_text("mine\n")
    lines = ("/imge x", "/image", "/image nowhere.png", "/save x.jsonl", f"/image {torn}", "what?", "/reset")
    result = chatted(folder, *lines, "hello", f"/save {other}", "/help")
    for message in (
        "unknown command '/imge'", "Did you mean '/image'?", "no file is named", "there is no such file",
        "nothing was said yet", "torn.png", "holds something that this command did not write",
    ):  # fmt: skip
        assert message in result.stderr, message
    assert COMMANDS.splitlines()[0] in result.output and other.read_text() == "mine\n"
    assert "Traceback" not in result.stderr


def test_marks_and_media_of_a_turn_agree(folder: Path, picture: Path) -> None:
    chat = begin(folder, Sampling(TOKENS, temperature=0))
    chat.show("image", picture)
    chat.show("image", picture)
    with pytest.raises(DataError, match=r"chat  the text holds 1 × <image>, and 2 of that kind are given"):
        chat.say("what is <image>?", lambda _: None)
    chat.waiting.pop()
    chat.say("what is <image>?", lambda _: None)
    assert [part["type"] for part in chat.turns[0]["content"]] == ["text", "image", "text"]


def test_a_turn_that_fails_was_not_said(folder: Path, picture: Path) -> None:
    chat = begin(folder, Sampling(TOKENS, temperature=0))
    chat.show("image", picture)
    picture.unlink()
    result = CliRunner()
    with result.isolation(), pytest.raises(Exception, match=r"a three\.png"):
        chat.say("what?", lambda _: None)
    assert (chat.turns, chat.media) == ([], [])


def test_answers_for_programs(folder: Path) -> None:
    lines = chatted(folder, "hello", "more", options=("--temperature", "0", "--json")).stdout.splitlines()
    answers = [json.loads(line) for line in lines]
    assert [answer.keys() for answer in answers] == [{"token_ids", "text", "finished"}] * 2


def test_options_that_contradict(folder: Path) -> None:
    with pytest.raises(UsageError, match="does nothing with --temperature 0"):
        chatted(folder, options=("--temperature", "0", "--top-p", "0.5"))


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(AnswerEngine(load_generator(folder)), access=Access(key="right-key")) as address:
        yield address


def test_a_running_server_says_what_the_folder_says(folder: Path, picture: Path, address: str, tmp_path: Path) -> None:
    (tmp_path / "key.txt").write_text("right-key\n")
    lines = ("hello", f"/image {picture}", "what is this?", "/reset", "hello", "/save")
    here = chatted(folder, *lines)
    options = ("--temperature", "0", "--key-file", str(tmp_path / "key.txt"))
    for base in (address, f"{address}/v1/"):
        there = chatted(base, *lines, options=options)
        assert (there.stdout, there.stderr) == (here.stdout, here.stderr)
    answers = [json.loads(line) for line in chatted(address, "hello", options=(*options, "--json")).stdout.splitlines()]
    (answer,) = answers
    assert (as_shown(answer["text"]), answer["finished"]) == (here.stdout.splitlines()[0], False)


@contextmanager
def streaming(*answers: bytes, listed: bytes = b'{"data": [{"id": "x"}]}') -> Iterator[tuple[str, list[Any]]]:
    """A server that streams one of these bodies after the other, and what it was asked."""
    asked: list[Any] = []

    def behave(_: Hostile, request: bytes) -> Iterator[bytes]:
        head, _, body = request.partition(b"\r\n\r\n")
        if head.startswith(b"GET"):
            answer = listed
        else:
            asked.append(json.loads(body))
            answer = answers[len(asked) - 1]
        yield b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + answer

    BEHAVIOURS["streaming"] = behave
    with hostile("streaming") as server:
        yield server.url, asked


def events(*values: Any, done: bool = True) -> bytes:
    """A stream of these events."""
    lines = [b": waiting\n\n", *(b"data: " + json.dumps(value).encode() + b"\r\n\r\n" for value in values)]
    return b"".join([*lines, b"data: [DONE]\n\n"] if done else lines)


def event(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def test_a_server_chooses_its_own_length() -> None:
    for words, length in (([], None), (["--max-new-tokens", "3"], 3)):
        with streaming(events(event("length", content="yes"), done=False)) as (url, asked):
            said = CliRunner().invoke(command, [url, *words], input="hello\n")
        assert said.stdout == "yes\n" and said.stderr == "(cut off: --max-new-tokens)\n"
        assert asked[0].get("max_tokens") == length


def test_what_a_server_refuses_is_told(folder: Path, address: str, tmp_path: Path) -> None:
    (tmp_path / "key.txt").write_text("right-key\n")
    options = ("--key-file", str(tmp_path / "key.txt"))
    for model, given, error, message in (
        (address, (), UsageError, "the key is missing"),
        (address, ("--name", "tiny"), UsageError, "the key is missing"),
        (address, (*options, "--name", "other"), UsageError, "has no model 'other'.*It has: tiny"),
        ("http://127.0.0.1:9", (), MachineError, "cannot be reached: .*refused"),
        ("http://[::", (), UsageError, "is no address"),
        (address, ("--lora", "x"), UsageError, "--lora"),
        (address, ("--plugin", "json"), UsageError, "--plugin  is for models"),
        (str(folder), ("--name", "x"), UsageError, "is for servers"),
    ):
        with pytest.raises(error, match=message):
            chatted(model, "hello", options=given)


def told(*values: Any, done: bool = True) -> tuple[Answer, list[str]]:
    pieces: list[str] = []
    with streaming(events(*values, done=done)) as (url, _):
        model = RemoteModel(f"{url}/v1", "x")
        return model.answer([{"role": "user", "content": "?"}], [], Sampling(4), pieces.append), pieces


def test_thoughts_of_a_server() -> None:
    thinking = event(reasoning_content="so"), event(reasoning_content=" so"), event(content="two"), event("stop")
    answer, pieces = told(*thinking)
    assert (answer.text, answer.finished) == ("<think>so so</think>\ntwo", True) and "".join(pieces) == answer.text


@pytest.mark.edge("BS14")
def test_an_answer_without_end_broke_off_and_was_not_cut_at_a_length() -> None:
    with pytest.raises(MachineError, match="the server broke off: its answer has no end"):
        told(event(content="two"), done=False)
    assert told(event(content="two"))[0].finished
    with streaming(events(event(content="two"), done=False), events(event("stop", content="one"))) as (url, _):
        said = CliRunner().invoke(command, [url], input="hello\nhello\n")
    assert "cut off" not in said.stderr and "its answer has no end" in said.stderr and said.stdout.endswith("one\n")


@pytest.mark.edge("BS9")
@pytest.mark.parametrize(
    "value",
    [
        {"choices": [{"delta": None}]},
        {"choices": [{"finish_reason": None}]},
        {"choices": [{"delta": {"content": None}}]},
        {"choices": []},
        {"choices": None, "usage": {"total_tokens": 1}},
        {},
    ],
)
def test_events_that_add_nothing_are_passed_over(value: Any) -> None:
    answer, pieces = told(event(content="one"), value, event("stop", content=" two"))
    assert (answer.text, pieces, answer.finished) == ("one two", ["one", " two"], True)


@pytest.mark.edge("BS9")
@pytest.mark.parametrize(
    "value",
    [
        7,
        None,
        "text",
        [1],
        {"choices": 7},
        {"choices": {"delta": {}}},
        {"choices": [None]},
        {"choices": [[1]]},
        {"choices": [{"delta": 7}]},
        {"choices": [{"delta": ["a"]}]},
        {"choices": [{"delta": {"content": 7}}]},
        {"choices": [{"delta": {"content": ["a"]}}]},
        {"choices": [{"delta": {"reasoning_content": 7}}]},
        {"choices": [{"delta": {}, "finish_reason": 7}]},
        {"choices": [{"delta": {"content": "half \ud800"}}]},
        {"error": {"message": "the model failed"}},
        {"error": "the model failed"},
        {"error": 7},
    ],
)
def test_an_odd_event_is_one_sentence_and_the_conversation_goes_on(value: Any) -> None:
    with streaming(events(event(content="a"), value), events(event("stop", content="fine"))) as (url, asked):
        said = CliRunner().invoke(command, [url], input="hello\nagain\n")
    assert said.exception is None or isinstance(said.exception, SystemExit)
    assert said.stderr.count("\n") == 1 and said.stderr.startswith(f"{url}/v1  the server ")
    assert said.stdout == "afine\n" and [len(each["messages"]) for each in asked] == [1, 1]


@pytest.mark.edge("BS12")
def test_an_answer_controls_no_terminal() -> None:
    said = "a\x1b]52;c;Y2FuYXJ5\x07b\x1b[2J\x9bH"
    refused = {"error": {"message": f"no {said}"}}
    with streaming(events(event("stop", content=said)), events(refused)) as (url, _):
        shown = CliRunner().invoke(command, [url], input="hello\nhello\n")
        assert shown.stdout == "a\\x1b]52;c;Y2FuYXJ5\\x07b\\x1b[2J\\x9bH\n" and "no a\\x1b]52" in shown.stderr
    with streaming(events(event("stop", content=said))) as (url, _):
        shown = CliRunner().invoke(command, [url, "--json"], input="hello\n")
    assert json.loads(shown.stdout)["text"] == said and "\x1b" not in shown.stdout and "\x9b" not in shown.stdout


@pytest.mark.edge("BS9")
def test_a_server_that_streams_nothing_is_understood() -> None:
    whole = {"choices": [{"message": {"role": "assistant", "content": "all at once"}, "finish_reason": "stop"}]}
    with streaming(json.dumps(whole, indent=1).encode(), b"<html>no</html>") as (url, _):
        said = CliRunner().invoke(command, [url], input="hello\nhello\n")
    assert said.stdout == "all at once\n" and "is not JSON" in said.stderr


@pytest.mark.edge("BS9")
@pytest.mark.parametrize(
    "listed",
    [b"<html>", b"[]", b"7", b"null", b'{"data": 7}', b'{"data": [7]}', b'{"data": [{"id": 7}]}'],
)
def test_another_list_of_models_asks_for_a_name(listed: bytes) -> None:
    with streaming(events(event("stop", content="yes")), listed=listed) as (url, _):
        with pytest.raises(MachineError, match=r"Name (the model|one): --name NAME"):
            RemoteModel.at(url)
        said = CliRunner().invoke(command, [url, "--name", "y"], input="hello\n")
    assert (said.stdout, said.stderr) == ("yes\n", "")


@pytest.mark.edge("BS9")
@pytest.mark.parametrize(
    "line",
    ["/image ~nobody-of-this-name/x", "/save ~nobody-of-this-name/x", "/image \0", f"/image {'x' * 5000}"],
)
def test_a_file_that_cannot_be_named_is_one_sentence(line: str) -> None:
    with streaming(events(event("stop", content="one")), events(event("stop", content="two"))) as (url, _):
        said = CliRunner().invoke(command, [url], input=f"hello\n{line}\nhello\n")
    assert said.stdout == "one\ntwo\n" and said.stderr.count("\n") == 1


def test_a_line_that_fails_decides_the_exit_code_where_nobody_sits_at_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["chat", str(folder), "--max-new-tokens", "2", "--temperature", "0"]
    for lines, code, message in (
        ("hello\n", 0, ""),
        ("/image nowhere.png\n/imge\nhello\n", 4, "there is no such file"),
        ("half \ud800\n", 4, "lone surrogate"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert run(words) == code
        assert message in capsys.readouterr().err
