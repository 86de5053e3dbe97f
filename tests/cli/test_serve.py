"""`mm serve` as a command: what docs/inference.md shows works as written, SIGTERM finishes what runs, bad options."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from openai import OpenAI

from mindspeed_mm.cli.serve import command, read_key
from mindspeed_mm.core.errors import UsageError
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


def test_the_page_as_it_is_written_and_an_orderly_end(work: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (words,) = re.findall(r"^mm (serve .*)$", text, flags=re.MULTILINE)
    (python,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (curl,) = re.findall(r"```sh\n(curl .*?)```", text, flags=re.DOTALL)
    with server(work, *words.replace("8000", "0").split(), "--max-new-tokens", "400") as (process, address):
        there = address.removesuffix("/v1")
        code = python.replace("http://127.0.0.1:8000", there)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr
        shell = shutil.which("bash") or "sh"
        words_of_curl = [shell, "-c", f"curl -s {curl.replace('http://127.0.0.1:8000', there).removeprefix('curl ')}"]
        answer = json.loads(subprocess.run(words_of_curl, capture_output=True, text=True, timeout=TIMEOUT_S).stdout)
        assert answer["choices"][0]["message"]["role"] == "assistant"

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


def test_options_that_are_off(work: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abc\n")
    for path in (tmp_path / "short.txt", tmp_path / "none.txt"):
        with pytest.raises(UsageError, match=path.name):
            read_key(path)
    (tmp_path / "key.txt").write_text(" a-long-key\n")
    assert read_key(tmp_path / "key.txt") == "a-long-key"
    with pytest.raises(UsageError, match="there is no key"):
        CliRunner().invoke(command, [str(work / "runs/mine"), "--host", "0.0.0.0"], catch_exceptions=False)
    with pytest.raises(UsageError, match="--media-folder"):
        CliRunner().invoke(command, [str(work / "runs/mine"), "--media-folder", "nowhere"], catch_exceptions=False)
