"""What strangers may do to `mm serve`: bad requests beside good ones, limits, keys, files, addresses, early leaving."""

from __future__ import annotations

import asyncio
import base64
import http.server
import io
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from openai import OpenAI
from PIL import Image

from mindspeed_mm.core.errors import MachineError, UsageError
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.requests.serve import Access, ServeRequest, check_request
from mindspeed_mm.tasks.serve.limits import Limits
from mindspeed_mm.tasks.serve.listening import listen
from tests.helpers.served import NAME, served
from tests.helpers.tiny_media import write_video
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_vl

WAIT_S = 30
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
TIGHT = Limits(
    max_body_mib=3, max_body_seconds=1, max_media=3, max_media_mib=1, max_pixels=10_000, max_media_seconds=2,
    max_characters=2000, max_prompt_tokens=400, max_new_tokens=64, max_seconds=60,
)  # fmt: skip
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}


def png(width: int, height: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (width, height), (9, 40, 200)).save(data, "png")
    return data.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises many pixels, of a few bytes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 10_000)) + chunk(b"IEND", b"")


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media") / "allowed"
    folder.mkdir()
    (folder / "good.png").write_bytes(png(32, 48))
    (folder.parent / "secret.png").write_bytes(png(32, 48))
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    (folder / "up").symlink_to(folder.parent)
    write_video(folder / "long.mp4", [9] * 24, fps=4)
    return folder


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    return load_generator(make_tiny_qwen3_vl(tmp_path_factory.mktemp("model"), tie=False, initializer_range=0.4))


@pytest.fixture(scope="module")
def address(generator: Generator, media: Path) -> Iterator[str]:
    with served(AnswerEngine(generator), TIGHT, Access(media_folder=media)) as address:
        yield address


def post(address: str, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of an answer, by a bare connection."""
    import http.client

    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=WAIT_S)
    with closing(connection):
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def chat(**fields: Any) -> bytes:
    usual = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return json.dumps({**usual, **fields}).encode()


def shown(*parts: Any) -> bytes:
    return chat(messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}])


def picture(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


WRONG: dict[str, list[Any]] = {
    "messages": [None, [], {}, "hi", 7, [None], ["hi"], [7], [[]], [{}], [{"role": "user"}], [{"content": "x"}],
                 [{"role": "wizard", "content": "x"}], [{"role": "user", "content": None}],
                 [{"role": "user", "content": 7}], [{"role": "user", "content": [7]}],
                 [{"role": "user", "content": [{"type": "picture"}]}],
                 [{"role": "user", "content": [{"type": "text"}]}],
                 [{"role": "user", "content": [{"type": "image_url"}]}],
                 [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
                 [{"role": "user", "content": [{"type": "image_url", "image_url": 7}]}],
                 [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}],
                 [{"role": "system", "content": "a"}],
                 [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]],
    "max_tokens": [0, -1, "7", 1.5, True],
    "max_completion_tokens": [0, -5, "many", []],
    "temperature": [1e-40, -1, "warm", [], 101, {}],
    "top_p": [-0.1, 1.1, "x", []],
    "top_k": [-2, 1.5, "x"],
    "min_p": [-1, 2, "x"],
    "repetition_penalty": [0, -1, "x"],
    "seed": [-2, 1.5, 2**63, "x"],
    "stream": ["yes", 7, []],
    "stream_options": [7, "x", [], {"include": True}],
    "stop": [7, [7], [""], ["x" * 300], {}],
    "tools": [7, "x", [7], [{}], [{"type": "function"}], [{"type": "function", "function": {}}], [None]],
    "tool_choice": ["required", {"type": "function"}, 7],
    "parallel_tool_calls": [False, "no"],
    "store": [True],
    "service_tier": ["flex"],
    "n": [0, -1, "x"],
    "logprobs": [7, "x"],
    "top_logprobs": [5, 21, "x"],
    "response_format": [{"type": "json_schema"}, {"type": "xml"}, {"kind": "text"}, "json"],
    "frequency_penalty": [2.1, "x"],
    "presence_penalty": [-2.1, "x"],
    "logit_bias": [{"5": 101}, {"a": 1}, {"-1": 1}, {"99999": 1}, 7],
    "chat_template_kwargs": [7, {"messages": []}, {"no_such_variable": 1}],
    "reasoning_effort": ["low", 7],
    "ignore_eos": [7],
    "model": [7, [], {}],
}  # fmt: skip
"""Field → values that are refused."""


def bad_requests(media: Path) -> dict[str, tuple[bytes, int, str]]:
    """Name → a request, its status and a part of what is said."""
    good = png(32, 48)
    cases: dict[str, tuple[bytes, int, str]] = {
        "empty": (b"", 400, "not JSON"),
        "bomb": (shown(picture(uri(bomb(30_000, 30_000)))), 413, "--max-pixels 10,000"),
        "large picture": (shown(picture(uri(bomb(9_000, 9_000)))), 413, "--max-pixels 10,000"),
        "small bomb": (shown(picture(uri(bomb(200, 200)))), 413, "--max-pixels 10,000"),
        "many pixels": (shown(picture(uri(png(101, 100)))), 413, "--max-pixels"),
        "truncated": (shown(picture(uri(good[: len(good) - 30]))), 400, ""),
        "torn header": (shown(picture(uri(good[:20]))), 400, ""),
        "no picture": (shown(picture(uri(b"<html>not a picture</html>"))), 400, "html"),
        "other format": (shown(picture(uri(b"%!PS-Adobe\n"))), 400, "EPS not allowed"),
        "large medium": (shown(picture(uri(b"x" * 1_200_000))), 413, "--max-media-mib 1"),
        "many media": (shown(*[picture(uri(good))] * 4), 413, "--max-media 3"),
        "long video": (
            shown({"type": "video_url", "video_url": {"url": "long.mp4"}}), 413, "--max-media-seconds 2",
        ),
        "frames": (shown({"type": "video_url", "video_url": [uri(good)] * 300}), 413, "--max-frames 256"),
        "sound": (shown({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}), 400, ""),
        "long text": (chat(messages=[{"role": "user", "content": "x" * 2001}]), 413, "--max-characters 2,000"),
        "many tokens": (chat(messages=[{"role": "user", "content": "q1" * 900}]), 413, "--max-prompt-tokens 400"),
        "10 MB of text": (chat(messages=[{"role": "user", "content": "x" * 10_000_000}]), 413, "--max-body-mib 3"),
        "long answer": (chat(max_tokens=65), 413, "--max-new-tokens 64"),
        "absolute": (shown(picture(str(media.parent / "secret.png"))), 400, "outside the media roots"),
        "link": (shown(picture("link.png")), 400, "outside the media roots"),
        "linked folder": (shown(picture("up/secret.png")), 400, "outside the media roots"),
        "dots": (shown(picture("../secret.png")), 400, "outside the media roots"),
        "file dots": (shown(picture(f"file://{media}/../secret.png")), 400, "outside the media roots"),
        "file encoded": (shown(picture(f"file://{media}/%2e%2e/secret.png")), 400, "outside the media roots"),
        "device": (shown(picture("file:///dev/zero")), 400, "outside the media roots"),
        "not there": (shown(picture("nowhere.png")), 400, "not found"),
        "a folder": (shown(picture("up/allowed")), 400, ""),
        "remote": (shown(picture("http://127.0.0.1:9/a.png")), 400, "remote addresses are not fetched"),
        "remote metadata": (shown(picture("https://169.254.169.254/latest")), 400, "remote addresses"),
        "ftp": (shown(picture("ftp://example.org/a.png")), 400, ""),
        "model": (chat(model="other"), 404, "only 'tiny'"),
        "assistant last": (chat(messages=[{"role": "assistant", "content": "x"}]), 400, "nothing is asked"),
        "half a character": (chat(messages=[{"role": "user", "content": "\ud800"}]), 400, "lone surrogate"),
        "half of a system prompt": (chat(messages=[{"role": "system", "content": "a\udc00"},
                                                   {"role": "user", "content": "x"}]), 400, "lone surrogate"),
        "half of a tool": (chat(tools=[{"type": "function", "function": {"name": "\ud83d"}}]), 400, "lone surrogate"),
        "half of a name": (chat(model="\ud800"), 400, "lone surrogate"),
        "bytes of half a character": (chat(stop="?").replace(b"?", b"\xed\xa0\x80"), 400, "not UTF-8"),
        "deep": (b'{"messages": ' + b"[" * 100_000, 400, "nested too deeply"),
        "deep tools": (chat(tools=[json.loads('{"a":' * 400 + "1" + "}" * 400)]), 400, ""),
        "list": (b"[]", 400, "no object"),
        "bytes": (b"\xff\xfe\x00", 400, "not JSON"),
        "stops": (chat(stop=["a"] * 5), 400, "'stop' takes up to 4"),
        "typo": (chat(top_n=1), 400, "Did you mean 'top_p'?"),
        "not transcribed": (chat(), 415, "multipart/form-data"),
    }  # fmt: skip
    for name, values in WRONG.items():
        for number, value in enumerate(values):
            cases[f"{name} {number}"] = (chat(**{name: value}), 400, "")
    for number in range(1, 60):
        body = shown(picture(uri(good)))
        cases[f"cut {number}"] = (body[: len(body) * number // 60], 400, "not JSON")
    paths = [
        "%00", "a\0b.png", "x" * 999, "~/.ssh/id_rsa", "//etc/passwd", "..\\secret.png", "up/../secret.png", " ", ".",
        "..", "/proc/self/environ", "file:", "file://", "javascript:1", "data:", "data:,x", "http://",
        "data:image/png;base64,", "data:image/png;base64,@@@", "data:image/png,x", "HTTP://x/y",
    ]  # fmt: skip
    for name in paths:
        cases[f"path {name[:20]!r}"] = (shown(picture(name)), 400, "")
    return cases


def test_200_bad_requests_are_answered_in_one_line_while_good_ones_go_on(address: str, media: Path) -> None:
    cases = bad_requests(media)
    assert len(cases) >= 200
    stop, good, failed = threading.Event(), [], []

    def go_on() -> None:
        while not stop.is_set():
            status, answer = post(address, chat())
            (good if status == 200 and answer["choices"] else failed).append(status)

    client = threading.Thread(target=go_on)
    client.start()
    wrong = {}
    try:
        for name, (body, status, said) in cases.items():
            path = "/v1/audio/transcriptions" if status == 415 else "/v1/chat/completions"
            begun_s = time.monotonic()
            found, answer = post(address, body, path)
            error = answer.get("error", {})
            line = str(error.get("message"))
            is_right = found == status and said in line and "\n" not in line and 0 < len(line) < 400
            if not is_right or time.monotonic() - begun_s > 10 or set(error) != {"message", "type", "param", "code"}:
                wrong[name] = (found, answer)
    finally:
        stop.set()
        client.join(WAIT_S)
    assert wrong == {}, "\n".join(f"{name}: {found}" for name, found in wrong.items())
    assert len(good) > 5 and failed == []


def test_a_question_beyond_the_models_positions_is_refused(tmp_path: Path) -> None:
    short = load_generator(make_tiny_qwen3(tmp_path / "text", max_position_embeddings=40))
    with served(AnswerEngine(short)) as address:
        status, answer = post(address, chat(messages=[{"role": "user", "content": "word " * 50}]))
        assert (status, answer["error"]["code"]) == (413, "context_length_exceeded")
        assert "the model takes 40 with the answer" in answer["error"]["message"]
        assert post(address, chat())[0] == 200


def test_a_key_is_asked_for(generator: Generator) -> None:
    with served(AnswerEngine(generator), access=Access(key="right-key")) as address:
        wrong = OpenAI(base_url=f"{address}/v1", api_key="wrong-key", max_retries=0)
        for call in (wrong.models.list, lambda: wrong.chat.completions.create(model=NAME, max_tokens=1, **LONG)):
            with pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"):
                call()
        for path in ("/metrics", "/v1/models", "/v1/chat/completions", "/nowhere"):
            assert post(address, b"", path)[0] == 401
            assert post(address, b"", path, Authorization="Bearer right-key\xff")[0] == 401
        right = OpenAI(base_url=f"{address}/v1", api_key="right-key", max_retries=0)
        assert right.chat.completions.create(model=NAME, max_tokens=1, **LONG).choices


def test_keys_are_compared_in_constant_time(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_mm.tasks.serve import guard

    compared: list[tuple[bytes, bytes]] = []
    compare: Callable[[bytes, bytes], bool] = guard.hmac.compare_digest
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    with served(AnswerEngine(generator), access=Access(key="right-key")) as address:
        assert post(address, b"", Authorization="Bearer wrong")[0] == 401
    assert compared == [(b"Bearer wrong", b"Bearer right-key")]


def test_only_this_machine_may_ask_unless_there_is_a_key(tmp_path: Path) -> None:
    assert ServeRequest(tmp_path).host == "127.0.0.1"
    key = tmp_path / "key.txt"
    key.write_text("right-key\n")
    for host in ("0.0.0.0", "::", "192.168.0.4", "example.org"):
        with pytest.raises(UsageError, match="there is no key"):
            check_request(ServeRequest(tmp_path, host=host))
        assert check_request(ServeRequest(tmp_path, host=host, key_file=key)).hosts is None
    own = check_request(ServeRequest(tmp_path)).hosts
    assert own is not None and {"127.0.0.1", "localhost"} <= own
    with closing(listen("127.0.0.1", 0)) as taken, pytest.raises(MachineError, match="cannot be listened at"):
        listen("127.0.0.1", taken.getsockname()[1])


def test_other_names_are_refused(generator: Generator) -> None:
    """A page on another name that leads here could read the answers."""
    with served(AnswerEngine(generator), access=Access(hosts=frozenset({"127.0.0.1"}))) as address:
        assert post(address, chat())[0] == 200
        for name in ("evil.example", "evil.example:80", "127.0.0.1.evil.example"):
            status, answer = post(address, chat(), Host=name)
            assert (status, answer["error"]["code"]) == (403, "unknown_host")


class Slow:
    """A generator that answers once it is let, or when nobody waits any more."""

    def __init__(self, generator: Generator) -> None:
        self.encoder, self.thinks, self._generator = generator.encoder, generator.thinks, generator
        self.adapters, self.encode = generator.adapters, generator.encode
        self.begun, self.let = threading.Semaphore(0), threading.Event()
        self.ended: list[Any] = []

    def answer_live(self, rows: Any) -> Any:
        for row in rows:
            row.begin(self._generator._text_of)
        self.begun.release()
        while not self.let.is_set() and not all(row.take(65, []) for row in rows):
            time.sleep(0.01)
            for row in rows:
                row.token_ids = row.token_ids[:1]
        self.ended += [row.ending for row in rows]
        return [row.close(self._generator._text_of) for row in rows]


def eventually(is_so: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return is_so()


def connected(address: str, body: bytes) -> socket.socket:
    """A connection that has asked and does not listen."""
    parts = urlsplit(address)
    connection = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=WAIT_S)
    connection.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    blocks = []
    while block := connection.recv(4096):
        blocks.append(block)
    return b"".join(blocks)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(generator: Generator, stream: bool) -> None:
    slow = Slow(generator)
    engine = AnswerEngine(slow, most_rows=1)  # type: ignore[arg-type]
    with served(engine, Limits(max_requests=2)) as address:
        first = connected(address, chat(stream=stream, max_tokens=4000))
        assert slow.begun.acquire(timeout=WAIT_S)
        second = connected(address, chat(stream=stream, max_tokens=4000))
        assert eventually(lambda: engine.waiting == 1)
        status, answer = post(address, chat())
        assert status == 429 and answer["error"]["param"] == "--max-requests"
        second.close()
        assert eventually(lambda: engine.waiting == 0)
        first.close()
        assert eventually(lambda: slow.ended == ["given up"])
        slow.let.set()
        assert eventually(lambda: post(address, chat())[0] == 200)


def test_what_takes_too_long_is_refused(generator: Generator) -> None:
    slow = Slow(generator)
    with served(AnswerEngine(slow), Limits(max_seconds=0.3)) as address:  # type: ignore[arg-type]
        status, answer = post(address, chat(max_tokens=4000))
        assert status == 408 and answer["error"]["param"] == "--max-seconds"
        assert eventually(lambda: slow.ended == ["given up"])
        client = OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        with pytest.raises(openai.APIError, match="--max-seconds"):
            list(client.chat.completions.create(model=NAME, stream=True, **LONG))


def test_a_stream_says_something_while_it_waits(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_mm.tasks.serve.chat._HEARTBEAT_S", 0.02)
    slow = Slow(generator)
    engine = AnswerEngine(slow)  # type: ignore[arg-type]
    asked = chat(stream=True, max_tokens=4000)
    with served(engine) as address, closing(connected(address, asked)) as connection:
        heard = block = b" "
        while block and heard.count(b": waiting\n\n") < 2:
            heard += (block := connection.recv(4096))
        slow.let.set()
        while block and b"data: [DONE]" not in heard:
            heard += (block := connection.recv(4096))
    assert heard.count(b": waiting\n\n") >= 2 and b"data: [DONE]" in heard


def test_a_request_that_does_not_arrive_is_refused(address: str) -> None:
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=WAIT_S) as connection:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        answer = received(connection)
        assert b" 408 " in answer and b"--max-body-seconds" in answer


def test_a_body_without_a_length_is_counted(address: str) -> None:
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=WAIT_S) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        block = b"100000\r\n" + b" " * 2**20 + b"\r\n"
        for _ in range(5):
            connection.sendall(block)
        connection.sendall(b"0\r\n\r\n")
        answer = received(connection)
        assert b" 413 " in answer and b"--max-body-mib" in answer


class _Pictures(http.server.BaseHTTPRequestHandler):
    """Answers with a picture, or leads elsewhere."""

    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        data = png(32, 48)
        self.send_response(302 if self.path.startswith("/elsewhere") else 200)
        self.send_header("Location", "http://localhost:1/secret.png")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def test_remote_addresses_are_fetched_from_allowed_hosts_alone(generator: Generator) -> None:
    _Pictures.asked = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pictures) as pictures:
        threading.Thread(target=pictures.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{pictures.server_address[1]}"
        with served(AnswerEngine(generator), access=Access(remote_hosts=frozenset({host}))) as address:
            assert post(address, shown(picture(f"http://{host}/a.png")))[0] == 200
            assert _Pictures.asked == ["/a.png"]
            for url in (f"http://{host}/elsewhere", f"http://localhost:{pictures.server_address[1]}/a.png"):
                status, answer = post(address, shown(picture(url)))
                assert status == 400 and "a host that is not allowed" in answer["error"]["message"]
            assert _Pictures.asked == ["/a.png", "/elsewhere"]
        with served(AnswerEngine(generator)) as address:
            assert post(address, shown(picture(f"http://{host}/a.png")))[0] == 400
            for name in ("good.png", "/etc/passwd", "file:///etc/passwd"):  # no folder is allowed
                assert post(address, shown(picture(name)))[0] == 400
        assert _Pictures.asked == ["/a.png", "/elsewhere"]
        pictures.shutdown()


def test_a_model_that_fails_answers_500_and_the_next_request(
    generator: Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    class Failing(Slow):
        def answer_live(self, rows: Any) -> Any:
            calls.append(len(rows))
            if len(calls) == 1:
                raise MemoryError("no more")
            return generator.answer_live(rows)

    with served(AnswerEngine(Failing(generator))) as address:  # type: ignore[arg-type]
        status, answer = post(address, chat())
        assert (status, answer["error"]["message"]) == (500, "the server failed: MemoryError.")
        assert post(address, chat())[0] == 200
    assert "no more" in capsys.readouterr().err


def soak(address: str, requests: int, clients: int) -> list[int]:
    """Statuses of requests by clients of which every fifth leaves before its answer."""
    seen: list[int] = []

    async def one(number: int, turn: asyncio.Semaphore) -> None:
        async with turn:
            parts = urlsplit(address)
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            body = chat(
                stream=number % 2 == 0, max_tokens=1 + number % 4, messages=[{"role": "user", "content": str(number)}]
            )
            writer.write(HEAD + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            if number % 5:
                seen.append(int((await reader.read(-1)).split(b" ", 2)[1]))
            writer.close()

    async def all_of_them() -> None:
        turn = asyncio.Semaphore(clients)
        await asyncio.gather(*(one(number, turn) for number in range(requests)))

    asyncio.run(all_of_them())
    return seen


def check_soak(generator: Generator, requests: int) -> None:
    engine = AnswerEngine(generator)
    with served(engine, Limits(max_requests=64)) as address:
        seen = soak(address, requests, 32)
        assert len(seen) == requests - requests // 5 and set(seen) == {200}
        assert eventually(lambda: (engine.waiting, engine.counts.running) == (0, 0))
        assert post(address, chat())[0] == 200


def test_clients_that_come_and_leave(generator: Generator) -> None:
    check_soak(generator, 60)


@pytest.mark.slow
def test_2000_requests_leave_nothing_behind(generator: Generator) -> None:
    import psutil

    check_soak(generator, 200)
    before_mib = psutil.Process().memory_info().rss / 2**20
    check_soak(generator, 2000)
    assert psutil.Process().memory_info().rss / 2**20 - before_mib < 60
    assert threading.active_count() < 40


def test_errors_name_fields_of_the_request_and_options_of_the_server(address: str) -> None:
    asked: dict[str, bytes] = {
        "messages[0].content": chat(messages=[{"role": "user", "content": 7}]),
        "tools[0]": chat(tools=[7]),
        "temperature": chat(temperature=1e-40),
        "--media-folder": shown(picture("file:///etc/passwd")),
    }
    assert {field: post(address, body)[1]["error"]["param"] for field, body in asked.items()} == {
        field: field for field in asked
    }
