"""`mm serve --engine vllm` and `sglang`, with a stand-in: how they are started and ended, what reaches them."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from PIL import Image

from mindspeed_mm.core.errors import MachineError, UsageError
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.sampling.answers.asking import RowsView
from mindspeed_mm.tasks.requests.serve import Access, ServeRequest, check_request
from mindspeed_mm.tasks.serve import backend, serve
from mindspeed_mm.tasks.serve.limits import Limits
from tests.helpers.served import NAME, served
from tests.helpers.tiny_models import make_tiny_qwen3_vl

STAND_IN = f"""#!{sys.executable}
import http.server, json, os, sys, time
words, log = sys.argv[1:], os.environ["STAND_IN_LOG"]
if os.environ.get("STAND_IN_FAILS"):
    sys.exit(7)
note = lambda value: open(log, "a").write(json.dumps(value) + "\\n")
note({{"words": words, "pid": os.getpid()}})
if "--config" in words:
    settings = words[words.index("--config") + 1]
    assert os.stat(os.path.dirname(settings)).st_mode & 0o77 == 0
    key = json.load(open(settings))["api-key"]
else:
    key = os.environ["VLLM_API_KEY"]

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        is_known = self.headers["Authorization"] == "Bearer " + key
        note({{"path": self.path, "known": is_known, "body": body.decode("latin-1")}})
        if b"stream" in body:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for piece in ("one ", "two"):
                delta = {{"index": 0, "delta": {{"content": piece}}, "finish_reason": None}}
                self.wfile.write(b"data: " + json.dumps({{"id": "x", "choices": [delta]}}).encode() + b"\\n\\n")
                self.wfile.flush()
                time.sleep(0.05)
            self.wfile.write(b"data: [DONE]\\n\\n")
            return
        message = {{"index": 0, "message": {{"role": "assistant", "content": "three"}}, "finish_reason": "stop"}}
        answer = json.dumps({{"id": "x", "choices": [message], "text": "heard"}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass

port = int(words[words.index("--port") + 1])
http.server.ThreadingHTTPServer((words[words.index("--host") + 1], port), Answers).serve_forever()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_vl(tmp_path_factory.mktemp("work") / "mine")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the stand-in notes; it is found as `vllm` and as `sglang`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("vllm", "sglang"):
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log.jsonl"))
    return tmp_path / "log.jsonl"


def noted(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture
def client(folder: Path, log: Path, tmp_path: Path) -> Iterator[OpenAI]:
    config = tmp_path / "run.yaml"
    preprocess = "preprocess_parameters: {image_max_pixels: 4096, image_min_pixels: 256}"
    config.write_text(f"model: {{model_name_or_path: {folder}}}\ndata: {{dataset_param: {{{preprocess}}}}}\n")
    request = ServeRequest(folder, name=NAME, engine="vllm", config=config)
    with serve.engine_of(request) as engine:
        assert isinstance(engine, backend.Backend)
        with served(engine, Limits(max_pixels=10_000, max_samples=2), Access()) as address:
            yield OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


def picture(width: int) -> str:
    data = io.BytesIO()
    Image.new("RGB", (width, 48)).save(data, "png")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def shown(url: str) -> Any:
    part = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]


def test_it_is_started_as_the_run_was_and_ended(client: OpenAI, log: Path, folder: Path) -> None:
    words, pid = noted(log)[0]["words"], noted(log)[0]["pid"]
    assert words[:2] == ["serve", str(folder)] and words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--served-model-name") + 1] == NAME
    assert json.loads(words[words.index("--mm-processor-kwargs") + 1]) == {"min_pixels": 256, "max_pixels": 4096}
    assert b"key" not in Path(f"/proc/{pid}/cmdline").read_bytes()  # other users can read that


def test_what_reaches_it(client: OpenAI, log: Path) -> None:
    answer = client.chat.completions.create(model=NAME, messages=shown(picture(32)), n=2, logprobs=True, temperature=0)
    assert answer.choices[0].message.content == "three"
    passed = noted(log)[-1]
    sent = json.loads(passed["body"])
    assert passed["known"] and passed["path"] == "/v1/chat/completions"
    assert sent["messages"] == shown(picture(32)) and (sent["n"], sent["logprobs"]) == (2, True)
    assert sent["max_completion_tokens"] == Limits().max_new_tokens
    stream = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "hello"}], stream=True)
    assert [chunk.choices[0].delta.content for chunk in stream] == ["one ", "two"]


def test_what_does_not(client: OpenAI, log: Path) -> None:
    before = len(noted(log))
    for fields, said in (
        ({"messages": shown("http://169.254.169.254/x")}, "remote addresses"),
        ({"messages": shown("file:///etc/passwd")}, "files of the server's machine"),
        ({"messages": shown(picture(900))}, "--max-pixels"),
        ({"messages": shown(picture(32)), "n": 3}, "--max-samples"),
        ({"messages": shown(picture(32)), "max_tokens": 10**6}, "--max-new-tokens"),
        (
            {"messages": shown(picture(32)), "extra_body": {"chat_template": "{{ 1 }}"}},
            "'chat_template' is not a field",
        ),
        ({"messages": shown(picture(32)), "model": "other"}, "only 'tiny'"),
    ):
        with pytest.raises(openai.APIStatusError, match=said):
            client.chat.completions.create(**{"model": NAME, **fields})  # type: ignore[call-overload]
    for path in ("update_weights", "tokenize", "invocations"):
        with pytest.raises(openai.NotFoundError):
            client.post(path, cast_to=object, body={})
    assert len(noted(log)) == before


def test_an_engine_that_is_gone(client: OpenAI, log: Path) -> None:
    os.kill(noted(log)[0]["pid"], 9)
    time.sleep(0.2)
    with pytest.raises(openai.InternalServerError, match="the engine does not answer"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "hello"}])


def test_it_ends_with_the_server(folder: Path, log: Path) -> None:
    with serve.engine_of(ServeRequest(folder, engine="vllm")) as engine:
        assert isinstance(engine, backend.Backend) and engine.is_ready()
        port = engine.port
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
    done = subprocess.run(["ps", "-p", str(noted(log)[0]["pid"])], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout


def test_sglang_is_started_and_asked(folder: Path, log: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    preprocess = "preprocess_parameters: {image_max_pixels: 4096}"
    config.write_text(f"model: {{model_name_or_path: {folder}}}\ndata: {{dataset_param: {{{preprocess}}}}}\n")
    with (
        serve.engine_of(ServeRequest(folder, name=NAME, engine="sglang", config=config)) as engine,
        served(engine) as address,
    ):
        client = OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        answer = client.chat.completions.create(model=NAME, messages=shown(picture(32)))
        words, pid = noted(log)[0]["words"], noted(log)[0]["pid"]
        assert isinstance(engine, backend.Backend)
        assert engine.key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert answer.choices[0].message.content == "three"
    assert words[:3] == ["serve", "--model-path", str(folder)] and words[words.index("--host") + 1] == "127.0.0.1"
    assert json.loads(words[words.index("--mm-process-config") + 1]) == {"image": {"max_pixels": 4096}}
    passed = noted(log)[-1]
    assert passed["known"] and json.loads(passed["body"])["model"] == NAME


def test_adapters_of_either(folder: Path, log: Path, tmp_path: Path) -> None:
    served = backend.Served(folder, NAME, RowsView(DatasetParam()), tmp_path)
    for start, model, words in (
        (backend.start_vllm, NAME, ["--lora-modules", f"{NAME}={tmp_path}"]),
        (backend.start_sglang, f"{NAME}:adapters", ["--lora-paths", f"adapters={tmp_path}"]),
    ):
        made = start(served, "key", 1)
        assert made.model == model and made.words[-2:] == words and "--enable-lora" in made.words


def test_where_it_cannot_be(folder: Path, log: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STAND_IN_FAILS", "1")
    with pytest.raises(MachineError, match="ended with exit code 7"), serve.engine_of(_asked(folder)):
        pass
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, title in (("vllm", "vLLM"), ("sglang", "SGLang")):
        asked = _asked(folder, name)
        with pytest.raises(MachineError, match=f"{title} is not installed"), serve.engine_of(asked):
            pass
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(UsageError, match="made here alone"):
        check_request(_asked(tmp_path))


def _asked(folder: Path, engine: Any = "vllm") -> ServeRequest:
    return ServeRequest(folder, engine=engine)
