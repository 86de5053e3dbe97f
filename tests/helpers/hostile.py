"""A server that answers as no server should: half bodies, drips, redirects, blanks, wrong types and the like."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

DRIP_S, DROPS = 0.02, 150
BLANKS = 8 << 20


@dataclass
class Hostile:
    """What it was asked, and how it answers."""

    behaviour: str
    port: int = 0
    elsewhere: str = "http://127.0.0.1:9"
    """Where a redirect leads."""
    asked: list[bytes] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def first_asked(self) -> bytes:
        """The first request. On a busy machine it is read after the one who asked has given up."""
        end_s = time.monotonic() + 10
        while not self.asked and time.monotonic() < end_s:
            time.sleep(0.01)
        return self.asked[0]


def _answer(body: bytes, status: str = "200 OK", head: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _value(json_text: str) -> Callable[[Hostile, bytes], Iterator[bytes]]:
    """An answer of this JSON; as an event where a stream was asked for."""

    def behave(_: Hostile, request: bytes) -> Iterator[bytes]:
        body = json_text.encode()
        yield _answer(b"data: " + body + b"\n\n" if b'"stream": true' in request else body)

    return behave


def _once(*parts: bytes) -> Callable[[Hostile, bytes], Iterator[bytes]]:
    return lambda _server, _request: iter(parts)


def _drip(first: bytes, each: bytes) -> Callable[[Hostile, bytes], Iterator[bytes]]:
    def behave(_: Hostile, _request: bytes) -> Iterator[bytes]:
        yield first
        for _ in range(DROPS):
            time.sleep(DRIP_S)
            yield each

    return behave


def _redirect(server: Hostile, _request: bytes) -> Iterator[bytes]:
    yield _answer(b"", "307 Temporary Redirect", f"Location: {server.elsewhere}/v1\r\n")


BEHAVIOURS: dict[str, Callable[[Hostile, bytes], Iterator[bytes]]] = {
    "closes at once": _once(),
    "half a body": _once(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"),
    "half a chunk": _once(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{"),
    "a bad length": _once(b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}"),
    "no status line": _once(b"garbage\r\n\r\n"),
    "a status out of range": _once(b"HTTP/1.1 99999 OK\r\nContent-Length: 2\r\n\r\n{}"),
    "a head without end": _once(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 300_000),
    "a body that drips": _drip(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
    "a great length": _drip(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n", b""),
    "a head that drips": _drip(b"HTTP/1.1 200 OK\r\nX: ", b"a"),
    "silence": _drip(b"", b""),
    "a redirect": _redirect,
    "an error": _once(_answer(b'{"error": {"message": "no"}}', "500 Internal Server Error")),
    "an error page": _once(_answer(b"<html>no</html>", "502 Bad Gateway")),
    "blanks": _once(_answer(b" " * BLANKS)),
    "compressed": _once(_answer(gzip.compress(b" " * (1 << 20)), head="Content-Encoding: gzip\r\n")),
    "too deep": _value("[" * 200_000),
    "not UTF-8": _once(_answer(b'data: {"scores": ["\xff"]}\n')),
    "half a character": _value(
        r'{"scores": [1, "\ud800"], "choices": [{"delta": {"content": "\ud800"}, "message": {"content": "\ud800"}}]}'
    ),
    "not a number": _value('{"scores": [NaN], "choices": [{"delta": {"content": NaN}, "message": {"content": NaN}}]}'),
    "another list": _value("[1, 2]"),
    "a number": _value("7"),
    "null": _value("null"),
    "numbers for lists": _value('{"scores": 7, "choices": 7, "meta_info": 7}'),
    "numbers for objects": _value('{"scores": [[1]], "choices": [7], "meta_info": {"output_token_logprobs": [7]}}'),
    "numbers for text": _value(
        '{"scores": ["1"], "choices": [{"delta": {"content": 7}, "message": {"content": 7}, "token_ids": ["a"],'
        ' "logprobs": {"token_logprobs": [-1]}}], "meta_info": {"output_token_logprobs": [[-1, "a"]]}}'
    ),
}


@contextmanager
def hostile(behaviour: str) -> Iterator[Hostile]:
    """It listens on a free port, and answers each connection in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Hostile(behaviour, listening.getsockname()[1])
        threading.Thread(target=_serve, args=(listening, server), daemon=True).start()
        yield server
        listening.shutdown(socket.SHUT_RDWR)


def _serve(listening: socket.socket, server: Hostile) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_reply, args=(connection, server), daemon=True).start()


def _reply(connection: socket.socket, server: Hostile) -> None:
    with suppress(OSError), connection:
        request = _read(connection)
        server.asked.append(request)
        for part in BEHAVIOURS[server.behaviour](server, request):
            connection.sendall(part)
            if not part and connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b"":
                return


def _read(connection: socket.socket) -> bytes:
    request = b""
    while b"\r\n\r\n" not in request:
        request += connection.recv(65536)
    head, _, body = request.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body
