"""A vision-language model as the judge: what it is asked, and what is read of its answer."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from PIL import Image

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.posttrain_rewards.registry import Judged, build_reward


class _Judging(ThreadingHTTPServer):
    asked: list[tuple[str, dict[str, Any]]]
    answers: dict[str, str]


class _Chat(BaseHTTPRequestHandler):
    server: _Judging

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


@pytest.fixture
def server() -> Iterator[_Judging]:
    serving = _Judging(("127.0.0.1", 0), _Chat)
    serving.asked, serving.answers = [], {}
    threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
    yield serving
    serving.shutdown()
    serving.server_close()


def scores(server: _Judging, completions: list[Any], **options: Any) -> list[float]:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    prompts = list(server.answers)
    reward = build_reward("vlm_judge", 1.0, {"url": url, "model": "judge", "retries": 0, **options})
    return reward(Judged(prompts, completions, [{}] * len(prompts)))


def test_its_number_is_the_score(server: _Judging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.answers = {"a box": "7", "a line": "I say 2.5.", "grain": "none", "{red}": "12"}
    picture = Image.new("RGB", (4, 4))
    found = scores(server, [picture, [picture] * 8, "text", picture], api_key_env="JUDGE_KEY")
    assert found[:2] == [0.7, 0.25] and all(math.isnan(each) for each in found[2:])
    by_prompt = {next(p for p in server.answers if p in r["messages"][0]["content"][0]["text"]): (path, r)
                 for path, r in server.asked}  # fmt: skip
    path, request = by_prompt["a box"]
    assert path == "/v1/chat/completions Bearer secret" and request["model"] == "judge" and request["temperature"] == 0
    assert [part["type"] for part in by_prompt["a line"][1]["messages"][0]["content"]] == ["text"] + ["image_url"] * 4
    assert by_prompt["grain"][1]["messages"][0]["content"][1] == {"type": "text", "text": "text"}


def test_a_judge_that_fails(server: _Judging) -> None:
    server.answers = {"a box": ""}
    with pytest.raises(MachineError, match="KeyError"):
        scores(server, ["x"])
    assert math.isnan(scores(server, ["x"], on_failure="null")[0])
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        scores(server, ["x"], api_key_env="NO_SUCH_KEY")
