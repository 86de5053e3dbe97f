"""`mm chat`: turns as plain transformers would answer them, what a slash does, and what goes wrong."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
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
from mindspeed_mm.tasks.serve.request import Access
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
        assert answer in "\n".join(output)
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
    assert answers == [{"token_ids": [], "text": here.stdout.splitlines()[0], "finished": False}]


def test_a_server_chooses_its_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(_server: RemoteModel, _method: str, _path: str, body: bytes) -> io.BytesIO:
        asked.append(json.loads(body).get("max_tokens"))
        return io.BytesIO(b'data: {"choices": [{"delta": {"content": "yes"}, "finish_reason": "length"}]}\n')

    monkeypatch.setattr(RemoteModel, "_listed", lambda _server: ["x"])
    monkeypatch.setattr(RemoteModel, "_asked", noted)
    for words in ([], ["--max-new-tokens", "3"]):
        said = CliRunner().invoke(command, ["http://127.0.0.1:9", "--name", "x", *words], input="hello\n")
        assert said.stdout == "yes\n" and said.stderr == "(cut off: --max-new-tokens)\n"
    assert asked == [None, 3]


def test_what_a_server_refuses_is_told(folder: Path, address: str, tmp_path: Path) -> None:
    (tmp_path / "key.txt").write_text("right-key\n")
    options = ("--key-file", str(tmp_path / "key.txt"))
    for model, given, error, message in (
        (address, (), UsageError, "the key is missing"),
        (address, ("--name", "tiny"), UsageError, "the key is missing"),
        (address, (*options, "--name", "other"), UsageError, "has no model 'other'.*It has: tiny"),
        ("http://127.0.0.1:9", (), MachineError, "does not answer"),
        ("http://[::", (), UsageError, "is no address"),
        (address, ("--lora", "x"), UsageError, "--lora"),
        (str(folder), ("--name", "x"), UsageError, "is for servers"),
    ):
        with pytest.raises(error, match=message):
            chatted(model, "hello", options=given)


def test_thoughts_of_a_server_and_answers_that_break_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = RemoteModel("http://127.0.0.1:9/v1", "x")

    def told(*events: Any) -> tuple[Answer, list[str]]:
        lines = [
            b": waiting\n",
            *(b"data: " + json.dumps(event).encode() + b"\n" for event in events),
            b"data: [DONE]\n",
        ]
        body = io.BytesIO(b"".join(lines))
        body.status = 200  # type: ignore[attr-defined]
        monkeypatch.setattr(RemoteModel, "_asked", lambda *_: body)
        pieces: list[str] = []
        return model.answer([{"role": "user", "content": "?"}], [], Sampling(4), pieces.append), pieces

    def event(finish: str | None = None, **delta: str) -> dict[str, Any]:
        return {"choices": [{"delta": delta, "finish_reason": finish}]}

    answer, pieces = told(
        event(reasoning_content="so"), event(reasoning_content=" so"), event(content="two"), event("stop")
    )
    assert (answer.text, answer.finished) == ("<think>so so</think>\ntwo", True) and "".join(pieces) == answer.text
    assert not told(event(content="two"))[0].finished
    with pytest.raises(MachineError, match="the model failed"):
        told(event(content="one"), {"error": {"message": "the model failed"}})


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
