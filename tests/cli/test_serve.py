"""`mm serve` as a command: what docs/inference.md shows works as written, SIGTERM finishes what runs, bad options."""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from click.testing import CliRunner
from openai import OpenAI
from PIL import Image

from mindspeed_mm.cli.serve import command
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.requests.shared import read_key
from mindspeed_mm.tasks.serve.limits import Limits
from tests.helpers.processes import ranks_of, wait_until_gone
from tests.helpers.served import NAME, served
from tests.helpers.tiny_models import make_tiny_qwen3_vl

PAGE = Path(__file__).parents[2] / "docs" / "inference.md"
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    make_tiny_qwen3_vl(folder / "runs" / "mine", tie=False, initializer_range=0.4)
    return folder


@contextmanager
def server(work: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "mindspeed_mm", *words], cwd=work, env=environment, text=True, stdout=subprocess.PIPE
    )
    watch = threading.Timer(TIMEOUT_S, process.kill)
    watch.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found is not None, line
        yield process, found[0]
    finally:
        watch.cancel()
        process.kill()
        process.wait()


def page_code() -> tuple[str, str, str]:
    """The command, the program and the call of curl that the page shows."""
    text = PAGE.read_text(encoding="utf-8")
    (words,) = re.findall(r"^mm (serve .*)$", text, flags=re.MULTILINE)
    python, *_ = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)  # the others speak
    (curl,) = re.findall(r"```sh\n(curl .*?)```", text, flags=re.DOTALL)
    return words, python, curl


def check_curl(curl: str) -> None:
    words = [shutil.which("bash") or "sh", "-c", f"curl -s {curl.removeprefix('curl ')}"]
    answer = json.loads(subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S).stdout)
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_the_page_as_it_is_written_and_an_orderly_end(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process; what the command adds is tested below."""
    _, python, curl = page_code()
    engine = AnswerEngine(load_generator(work / "runs" / "mine"))
    ending = ExitStack()
    there = ending.enter_context(served(engine, Limits(max_new_tokens=400)))
    exec(compile(python.replace("http://127.0.0.1:8000", there).replace("mine", NAME), str(PAGE), "exec"), {})
    assert capsys.readouterr().out.strip()
    check_curl(curl.replace("http://127.0.0.1:8000", there).replace("mine", NAME))

    client = OpenAI(base_url=f"{there}/v1", api_key="none", max_retries=0)
    asked: list[Any] = [{"role": "user", "content": "hello"}]
    pieces = iter(client.chat.completions.create(model=NAME, messages=asked, stream=True, max_tokens=400))
    next(pieces)
    end = threading.Thread(target=ending.close)  # as SIGTERM does
    end.start()
    *_, last = pieces
    assert last.choices[0].finish_reason in ("length", "stop")
    end.join(TIMEOUT_S)
    assert not end.is_alive()


@pytest.mark.slow
def test_the_command_as_it_is_written_and_its_end_by_a_signal(work: Path) -> None:
    words, python, curl = page_code()
    with server(work, *words.replace("8000", "0").split(), "--max-new-tokens", "400") as (process, address):
        there = address.removesuffix("/v1")
        code = python.replace("http://127.0.0.1:8000", there)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr
        check_curl(curl.replace("http://127.0.0.1:8000", there))

        client = OpenAI(base_url=address, api_key="none", max_retries=0)
        stream = client.chat.completions.create(
            model="mine", messages=[{"role": "user", "content": "hello"}], stream=True, temperature=0, max_tokens=400
        )
        pieces = iter(stream)
        next(pieces)
        process.send_signal(signal.SIGTERM)
        *_, last = pieces
        assert last.choices[0].finish_reason in ("length", "stop")
        assert process.wait(TIMEOUT_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["tensor_parallel_size: 2", "fully_shard_parallel_size: auto"])
def test_a_model_that_is_spread_over_ranks(work: Path, tmp_path: Path, sizes: str) -> None:
    """Says what it says in one process, to clients that come together, and ends as one."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"parallel: {{{sizes}, fsdp_plan: {{param_dtype: fp32, reduce_dtype: fp32}}}}\n")
    picture = io.BytesIO()
    Image.new("RGB", (32, 48), (200, 40, 9)).save(picture, "PNG")
    shown = {"url": f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"}

    def ask(address: str, model: str) -> list[str | None]:
        client = OpenAI(base_url=address, api_key="none", max_retries=0)

        def one(number: int) -> str | None:
            parts: list[Any] = [{"type": "text", "text": "what is it? " * (number + 1)}]
            parts += [{"type": "image_url", "image_url": shown}] * (number % 2)
            said = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": parts}],
                max_tokens=8,
                temperature=number // 3,
                seed=3,
            )
            return said.choices[0].message.content

        with ThreadPoolExecutor(6) as pool:
            return list(pool.map(one, range(6)))

    with served(AnswerEngine(load_generator(work / "runs" / "mine"))) as there:
        expected = ask(f"{there}/v1", NAME)
    words = ("serve", "runs/mine", "--port", "0", "--plan", str(plan), "--nproc", "2")
    with server(work, *words) as (process, address):
        ranks = ranks_of(process.pid)
        assert ask(address, "mine") == expected and len(set(expected)) > 3
        client = OpenAI(base_url=address, api_key="none", max_retries=0)
        asked: list[Any] = [{"role": "user", "content": "hello"}]
        with client.chat.completions.create(model="mine", messages=asked, stream=True, max_tokens=4000) as left:
            next(iter(left))
        pieces = iter(client.chat.completions.create(model="mine", messages=asked, stream=True, max_tokens=200))
        next(pieces)
        process.send_signal(signal.SIGTERM)
        *_, last = pieces
        assert last.choices[0].finish_reason in ("length", "stop")
        assert process.wait(TIMEOUT_S) == 0
        assert len(ranks) == 2
        wait_until_gone(ranks.values(), 1.0)


@pytest.mark.slow
def test_memory_stays_where_it_is_when_clients_come_and_leave(work: Path) -> None:
    """Every fourth of 2,000 clients leaves before its answer is there."""
    with server(work, "serve", "runs/mine", "--port", "0", "--max-new-tokens", "16") as (process, address):
        asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 16, "seed": 1, "temperature": 1}
        parts = urlsplit(address)

        def one(number: int) -> int:
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
            with closing(connection):
                body = json.dumps({**asked, "stream": number % 2 == 0})
                connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
                if number % 4 == 0:
                    return 0
                answer = connection.getresponse()
                answer.read()
                return answer.status

        def many(count: int) -> float:
            with ThreadPoolExecutor(16) as pool:
                assert set(pool.map(one, range(count))) == {0, 200}
            return psutil.Process(process.pid).memory_info().rss / 2**20

        warm_mib = many(400)
        grown_mib = many(2000) - warm_mib
        assert grown_mib < 48, grown_mib
        deadline_s = time.monotonic() + TIMEOUT_S
        while "mm_serve_running 0" not in (text := _metrics(address)) or "mm_serve_waiting 0" not in text:
            assert time.monotonic() < deadline_s, text
            time.sleep(0.1)


def _metrics(address: str) -> str:
    with urllib.request.urlopen(f"{address.removesuffix('/v1')}/metrics") as answer:
        text: str = answer.read().decode()
    return text


def test_options_that_are_off(work: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abc\n")
    for path in (tmp_path / "short.txt", tmp_path / "none.txt"):
        with pytest.raises(UsageError, match=path.name):
            read_key(path)
    (tmp_path / "key.txt").write_text(" a-long-key\n")
    assert read_key(tmp_path / "key.txt") == "a-long-key"
    with pytest.raises(UsageError, match="there is no key"):
        CliRunner().invoke(command, [str(work / "runs/mine"), "--host", "0.0.0.0"], catch_exceptions=False)
    with pytest.raises(UsageError, match="not spread"):
        CliRunner().invoke(command, [str(work / "runs/mine"), "--nproc", "2"], catch_exceptions=False)
    with pytest.raises(UsageError, match=r"the model itself is called 'mine'.*--name NAME"):
        CliRunner().invoke(command, [str(work / "runs/mine"), "--adapter", "mine=ad1"], catch_exceptions=False)
    with pytest.raises(UsageError, match="--media-folder"):
        CliRunner().invoke(command, [str(work / "runs/mine"), "--media-folder", "nowhere"], catch_exceptions=False)
