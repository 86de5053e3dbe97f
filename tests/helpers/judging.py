"""A server of OpenAI's interface whose model says what a test has put down for what it is asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JudgingServer(ThreadingHTTPServer):
    asked: list[tuple[str, dict[str, Any]]]
    answers: dict[str, str]


class _Chat(BaseHTTPRequestHandler):
    server: JudgingServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((f"{self.path} {self.headers['Authorization']}", request))
        text = request["messages"][0]["content"][0]["text"]
        answer = next(answer for prompt, answer in self.server.answers.items() if prompt in text)
        body = json.dumps({"choices": [{"message": {"content": answer}}]} if answer else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def judging(answers: dict[str, str]) -> Iterator[JudgingServer]:
    """Answers by a part of what is asked, the first that is found; an empty one is not as the interface has it."""
    serving = JudgingServer(("127.0.0.1", 0), _Chat)
    serving.asked, serving.answers = [], answers
    threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
    yield serving
    serving.shutdown()
    serving.server_close()
