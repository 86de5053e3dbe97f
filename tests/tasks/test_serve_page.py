"""The page of `mm serve` in a real Chromium: talking, showing a picture, drawing, keys and mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.draw import generate
from mindspeed_mm.tasks.draw.engine import DrawEngine
from mindspeed_mm.tasks.requests.serve import Access
from mindspeed_mm.tasks.serve.limits import Limits
from tests.helpers.browser import Page, browser, find_chromium
from tests.helpers.served import NAME, served
from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan
from tests.helpers.tiny_models import make_tiny_qwen3_vl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed (Debian: apt-get install chromium)"),
]
KEY = "right-key"
TURNS = "[...document.querySelectorAll('.turn')].map(turn => turn.innerText)"
REQUESTS = """
const fetched = window.fetch;
window.asked = [];
window.fetch = (...words) => { window.asked.push(words[1]?.body); return fetched(...words); };
"""
"""Keeps the bodies that the page sends."""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browser(tmp_path / "profile") as page:
        yield page


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    return load_generator(make_tiny_qwen3_vl(tmp_path_factory.mktemp("model"), tie=False, initializer_range=0.4))


def said(page: Page) -> list[str]:
    """The text of each turn."""
    found: list[str] = page.run(TURNS)
    return found


def is_there(element: str) -> str:
    return f"document.getElementById('{element}') !== null && !document.getElementById('{element}').hidden"


def test_talking(page: Page, generator: Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "red.png"
    Image.new("RGB", (64, 48), (200, 40, 9)).save(picture)
    (tmp_path / "broken.png").write_bytes(picture.read_bytes()[:40])
    limits = Limits(max_new_tokens=400, max_media=2)
    with served(AnswerEngine(generator), limits) as address:
        page.open(address)
        page.wait_until(is_there("chat"))
        assert page.run("document.title") == NAME and page.run("document.getElementById('asks-key').hidden")
        page.run(REQUESTS)

        page.attach("files", picture)
        page.wait_until("document.querySelectorAll('#chosen img').length === 1")
        page.type("text", "What is it?")
        page.press_enter()
        page.wait_until(f"{TURNS}.length === 2 && {TURNS}[1].length > 5")
        begun = said(page)
        assert begun[0] == "What is it?" and page.run(is_there("stop"))  # it is told while it is made
        page.wait_until("running === null")
        whole = said(page)[1].removesuffix("(cut off at its longest)").strip()
        assert len(whole) > len(begun[1]) and whole.startswith(begun[1].strip()[:5])
        assert page.run("document.querySelector('.user img').naturalWidth") == 64
        assert page.run("JSON.parse(asked[0]).messages[0].content.map(part => part.type)") == ["image_url", "text"]

        page.type("text", "one")
        page.press_enter(modifiers=8)
        page.type("text", "two")
        page.click("send")
        page.wait_until(f"running === null && {TURNS}.length === 4")
        assert page.run("JSON.parse(asked[1]).messages.map(turn => turn.role)") == ["user", "assistant", "user"]
        assert page.run("JSON.parse(asked[1]).messages[2].content") == "one\ntwo"

        page.click("reset")
        page.attach("files", tmp_path / "broken.png")
        page.wait_until("files.length === 1")
        page.type("text", "And this?")
        page.click("send")
        page.wait_until(f"running === null && {TURNS}.length === 2")
        assert page.run("document.querySelector('.error').innerText") != ""
        assert page.run("[document.getElementById('text').value, files.length]") == ["And this?", 1]  # to be mended
        page.click("reset")
        assert said(page) == [] and page.run("messages.length") == 0
    # Ours alone is the one failed request.
    assert [problem for problem in page.problems if "status of 400" not in problem] == []


def test_a_key(page: Page, generator: Generator) -> None:
    with served(AnswerEngine(generator), Limits(max_new_tokens=5), Access(key=KEY)) as address:
        page.open(address)
        page.wait_until(is_there("asks-key"))
        assert page.run("document.getElementById('name').innerText") == "the key is missing or wrong."
        page.type("key", KEY)
        page.press_enter()
        page.run("document.getElementById('key').blur()")
        page.wait_until(is_there("chat"))
        page.type("text", "hello")
        page.press_enter()
        page.wait_until(f"running === null && {TURNS}.length === 2")
        assert "error" not in page.run("document.querySelector('.assistant').innerHTML")


@pytest.mark.parametrize(
    ("make", "shown"), [(make_tiny_flux, "img"), (make_tiny_wan, "video")], ids=["pictures", "clips"]
)
def test_drawing(page: Page, tmp_path: Path, make: Any, shown: str) -> None:
    engine = DrawEngine(*generate.load_generator(make(tmp_path / "model", identity_vae=True)))
    with served(engine, Limits(max_steps=4)) as address:
        page.open(address)
        page.wait_until(is_there("draw"))
        assert page.run("document.getElementById('chat').hidden")
        page.type("steps", "2")
        page.type("size", "32x32")
        page.run(f"document.getElementById('frames').value = '{'5' if shown == 'video' else ''}'")
        page.type("prompt", "a cat")
        page.press_enter()
        page.wait_until(f"running === null && document.querySelectorAll('.assistant {shown}').length === 1")
        width = "videoWidth" if shown == "video" else "naturalWidth"
        page.wait_until(f"document.querySelector('.assistant {shown}').{width} === 32")
        page.run("document.getElementById('steps').value = 9")
        page.click("make")
        page.wait_until("document.querySelector('.error') !== null")
        assert "--max-steps 4" in page.run("document.querySelector('.error').innerText")
