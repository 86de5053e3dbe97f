"""Half-sent requests, slow ones and many connections do not keep other clients from `mm serve`; foreign pages do not
make it compute."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.requests.serve import Access, ServeRequest, check_request
from mindspeed_mm.tasks.serve import listening as serving
from mindspeed_mm.tasks.serve.limits import Limits
from tests.helpers.runs import mm
from tests.helpers.served import NAME, served
from tests.helpers.tiny_models import make_tiny_qwen3

WAIT_S = 20.0
JSON = b"Content-Type: application/json\r\n"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
BODY = json.dumps({"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()
WHOLE = HEAD + JSON + f"Content-Length: {len(BODY)}\r\nConnection: close\r\n\r\n".encode() + BODY


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    return load_generator(make_tiny_qwen3(tmp_path_factory.mktemp("model")))


@pytest.fixture
def crowd() -> Iterator[ExitStack]:
    """Connections that are closed at the end."""
    with ExitStack() as stack:
        yield stack


def connect(address: str, sent: bytes = b"") -> socket.socket:
    parts = urlsplit(address)
    connection = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=WAIT_S)
    connection.sendall(sent)
    return connection


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    blocks = []
    try:
        while block := connection.recv(2**16):
            blocks.append(block)
    except ConnectionError:
        pass
    return b"".join(blocks)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def asked(address: str, sent: bytes = WHOLE) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer to a whole request."""
    with closing(connect(address, sent)) as connection:
        answer = received(connection)
    return status_of(answer), json.loads(answer.partition(b"\r\n\r\n")[2])


@pytest.mark.edge("BS5")
@pytest.mark.parametrize("sent", [b"", b"GET / HT", HEAD, HEAD + JSON + b"Content-Length: 100\r\n\r\n{"])
def test_half_sent_requests_keep_no_client_out(generator: Generator, crowd: ExitStack, sent: bytes) -> None:
    """Nor those of the same address, of which this machine's clients are all."""
    limits = Limits(max_requests=4, max_connections_per_address=16)
    with served(AnswerEngine(generator), limits) as address:
        half = [crowd.enter_context(closing(connect(address, sent))) for _ in range(40)]
        begun_s = time.monotonic()
        for _ in range(3):
            assert asked(address)[0] == 200
            assert asked(address, b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")[0] == 200
        assert time.monotonic() - begun_s < limits.max_head_seconds
        first = received(half[0])
        assert status_of(first) == 429 and b"--max-connections-per-address 16" in first
        crowd.close()


@pytest.mark.edge("BS5")
def test_the_connections_of_all_addresses_are_limited(
    generator: Generator, crowd: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "SPARE_CONNECTIONS", 4)
    with served(AnswerEngine(generator), Limits(max_requests=4)) as address:
        half = [crowd.enter_context(closing(connect(address, HEAD))) for _ in range(12)]
        assert asked(address)[0] == 200 and status_of(received(half[0])) == 429
        crowd.close()


@pytest.mark.edge("BS5")
def test_a_head_has_a_time_limit_however_it_drips(generator: Generator) -> None:
    with served(AnswerEngine(generator), Limits(max_head_seconds=0.4)) as address:
        first = connect(address)
        second = connect(address, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        heard = b""
        while not heard.endswith(b"}"):  # and the connection stays
            heard += second.recv(2**16)
        assert status_of(heard) == 200
        begun_s, ended = time.monotonic(), b""
        for letter in HEAD * 2:
            try:
                second.sendall(bytes([letter]))
                second.settimeout(0.05)
                ended = second.recv(2**16)
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert 0.2 < time.monotonic() - begun_s < WAIT_S
        assert status_of(ended) == 408 and b"--max-head-seconds 0.4" in ended
        assert status_of(received(first)) == 408
        first.close()
        second.close()


@pytest.mark.edge("BS5")
def test_whoever_does_not_read_is_not_waited_for(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_AFTER_S", 0.2)
    with (
        served(AnswerEngine(generator), Limits(max_seconds=0.2, max_body_seconds=0.2)) as address,
        closing(connect(address)) as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(0.3)
        sent = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 2000
        begun_s = time.monotonic()
        try:
            while time.monotonic() - begun_s < WAIT_S:  # until the server hangs up
                try:
                    connection.sendall(sent)
                except TimeoutError:
                    continue
        except ConnectionError:
            pass
        assert time.monotonic() - begun_s < WAIT_S / 2
        assert asked(address)[0] == 200


@pytest.mark.edge("BS5")
def test_large_bodies_leave_room_for_small_ones(generator: Generator, crowd: ExitStack) -> None:
    limits = Limits(max_requests=1, max_body_mib=4)
    with served(AnswerEngine(generator), limits) as address:
        large = HEAD + JSON + f"Content-Length: {4 * 2**20}\r\n\r\n".encode() + b" " * (7 * 2**19)
        for _ in range(3):
            crowd.enter_context(closing(connect(address, large)))
        time.sleep(0.2)
        assert asked(address)[0] == 200
        crowd.close()


@pytest.mark.edge("BS5")
def test_the_limits_are_options() -> None:
    told = " ".join(mm("serve", "--help").out.split())
    for option in ("--max-head-seconds", "--max-body-seconds", "--max-connections-per-address"):
        assert option in told


def test_networks_of_ipv6_count_as_one_client() -> None:
    assert serving._site("2001:db8::1") == serving._site("2001:db8::ffff:1") != serving._site("2001:db9::1")
    assert serving._site("::ffff:10.0.0.1") == serving._site("10.0.0.1") != serving._site("10.0.0.2")


def with_headers(address: str, *headers: str, path: str = "/v1/chat/completions") -> tuple[int, dict[str, Any]]:
    lines = [f"POST {path} HTTP/1.1", f"Host: {urlsplit(address).netloc}", *headers, f"Content-Length: {len(BODY)}"]
    return asked(address, "\r\n".join([*lines, "Connection: close", "", ""]).encode() + BODY)


@pytest.mark.edge("BS10")
def test_pages_of_others_do_not_make_the_server_compute(generator: Generator) -> None:
    access = Access(hosts=frozenset({"127.0.0.1"}), origins=("https://models.example.org",))
    with served(AnswerEngine(generator), access=access) as address:
        typed, own = "Content-Type: application/json", address
        fine = [(typed,), (typed, f"Origin: {own}"), ("content-type: Application/JSON; charset=utf-8",)]
        fine.append((typed, "Origin: https://models.example.org"))
        for headers in fine:
            assert with_headers(address, *headers)[0] == 200
        port = urlsplit(own).port
        foreign = ["null", "https://evil.example", "http://127.0.0.1", f"http://127.0.0.1:{port}1", "http://", ""]
        foreign += [f"http://evil.example:{port}", "http://models.example.org"]
        for origin in foreign:
            status, answer = with_headers(address, typed, f"Origin: {origin}")
            assert (status, answer["error"]["code"]) == (403, "foreign_origin"), origin
        types = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "text/json"]
        for kind in types:
            status, answer = with_headers(address, f"Content-Type: {kind}")
            assert (status, answer["error"]["code"]) == (415, "invalid_content_type"), kind
        assert with_headers(address)[0] == 415
        status, _ = with_headers(address, typed, path="/v1/audio/transcriptions")
        assert status == 415


@pytest.mark.edge("BS10")
def test_origins_are_checked_before_the_model_is_loaded(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "model")
    for origin in ("models.example.org", "https://", "ftp://a", "https://a/b"):
        with pytest.raises(UsageError, match="is not the address of pages"):
            check_request(ServeRequest(folder, origins=(origin,)))
    known = check_request(ServeRequest(folder, origins=("https://models.example.org",)))
    assert known.origins == {"https://models.example.org"} and known.hosts is not None
