"""The page of `mm ui` in a real Chromium: a run is made in the form, started, watched and stopped; hostile names, a
key, narrow and dark windows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_mm.tasks.requests.serve import Access
from tests.helpers.browser import Page, browser, find_chromium
from tests.helpers.many_runs import make_run
from tests.helpers.served import served_board
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_rows, tiny_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed (Debian: apt-get install chromium)"),
]
KEY = "right-key-of-all"
ROWS = "document.querySelectorAll('#list tbody tr').length"


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browser(tmp_path / "profile") as page:
        yield page


def text(page: Page, element: str) -> str:
    found: str = page.run(f"document.getElementById('{element}').innerText")
    return found


def test_a_run_is_made_started_watched_and_stopped(page: Page, tmp_path: Path) -> None:
    root = tmp_path / "board"
    make_tiny_qwen3_vl(root / "model")
    make_rows(root)
    config = tiny_config(root, training={"train_iters": 4000, "save": None})
    (root / "start.yaml").write_text(json.dumps(config))
    with served_board(root) as address:
        page.open(f"{address}/#new")
        page.wait_until(
            "document.querySelectorAll('.field').length > 5 && document.querySelector('#configs').options.length === 2"
        )
        page.run(
            "document.getElementById('configs').value = 'start.yaml';"
            "document.getElementById('configs').dispatchEvent(new Event('change'))"
        )
        page.wait_until("document.getElementById('yaml').value.includes('train_iters')")

        page.run("document.getElementById('key-training.save').value = 'runs/first'")
        page.run("document.getElementById('key-training.lr').value = '-1'")
        page.click("put")
        page.wait_until(
            "document.getElementById('status').innerText.includes('training.lr')"
        )  # the browser's own check
        page.run("document.getElementById('key-training.lr').value = '0.002'")
        page.click("put")
        page.wait_until("document.getElementById('yaml').value.includes('runs/first')")
        page.click("check")
        page.wait_until("document.getElementById('findings').innerText.includes('No problem')")
        page.run("document.getElementById('name').value = 'first.yaml'")
        page.click("check-whole")
        page.wait_until("document.getElementById('findings').innerText.includes('up to the first batch')")
        page.click("show-rows")
        page.wait_until(
            "!document.getElementById('preview').hidden"
            " && document.getElementById('preview').srcdoc.includes('First micro-batch of training')"
        )
        assert page.run("document.getElementById('preview').sandbox.length") == 0

        page.click("start")
        page.wait_until("location.hash === '#jobs' && document.querySelectorAll('.job').length === 1")
        page.run("location.hash = 'runs'")
        page.wait_until(f"{ROWS} === 1 && board.runs[0].state === 'running' && board.runs[0].step > 3")
        page.run("document.querySelector('#list td.name button').click()")
        page.wait_until("document.querySelectorAll('#shown svg').length > 2")
        before = text(page, "shown")
        page.run("document.querySelector('#shown details:last-of-type').open = true")
        page.wait_until(f"document.getElementById('shown').innerText !== {json.dumps(before)}")  # it grows
        assert page.run("document.querySelector('#shown details:last-of-type').open")  # and stays as it was left
        page.run("location.hash = 'jobs'")
        page.run("[...document.querySelectorAll('.job button')].find(b => b.innerText === 'Stop and save').click()")
        page.wait_until("board.runs[0].state === 'stopped'")
        page.wait_until("document.querySelector('.job').innerText.includes('start it again to go on')")
        assert page.problems == []
    assert list((root / "runs" / "first").glob("iter_*"))


def test_hostile_names_run_nothing(page: Page, tmp_path: Path) -> None:
    for name in (
        "<img src=x onerror=document.title='bad'>",
        "<script>document.title='bad'</script>",
        "'\"&lt;",
        "b" * 255,
    ):
        run = make_run(tmp_path / "board" / name.replace("/", "∕"))
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"step": 41, "loss": 1, "reward/\\"><img src=x onerror=document.title=1>": 1}\n')
    with served_board(tmp_path / "board") as address:
        page.open(address)
        page.wait_until(f"{ROWS} === 4")
        page.run("document.querySelectorAll('#list input').forEach(tick => tick.click())")
        page.click("compare")
        page.wait_until("document.querySelectorAll('#shown svg').length > 2")
        assert page.run("document.title") == "Runs" and page.problems == []
        assert page.run("document.querySelectorAll('#shown img, #list img, #shown script').length") == 0


def test_a_key_is_asked_for(page: Page, tmp_path: Path) -> None:
    make_run(tmp_path / "board" / "run")
    with served_board(tmp_path / "board", Access(key=KEY), read_only=True) as address:
        page.open(address)
        page.wait_until("document.getElementById('asks-key')?.hidden === false")
        assert page.run(ROWS) == 0
        page.type("key", KEY)
        page.press_enter()
        page.wait_until(f"{ROWS} === 1 && document.getElementById('asks-key').hidden")
        assert page.run("[...document.querySelectorAll('.making')].every(each => each.hidden)")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 380])
def test_nothing_is_cut_off_and_everything_has_a_name(page: Page, tmp_path: Path, width: int, dark: bool) -> None:
    for number in range(3):
        make_run(tmp_path / "board" / f"a rather long name of a run, number {number}")
    with served_board(tmp_path / "board") as address:
        page.look(width, 900, dark=dark)
        page.open(address)
        page.wait_until(f"{ROWS} === 3")
        for view in ("runs", "new", "jobs", "run=" + page.run("board.runs[0].id")):
            page.run(f"location.hash = '{view}'")
            page.wait_until("document.querySelectorAll('.field').length > 5" if view == "new" else "true")
            time.sleep(0.3)
            assert page.run("document.documentElement.scrollWidth <= innerWidth"), view
            nameless = page.run(
                "[...document.querySelectorAll('input, select, textarea, button, iframe')].filter(each => "
                "!(each.labels?.length || each.innerText?.trim() || each.getAttribute('aria-label') || each.title)"
                ").filter(each => each.checkVisibility()).length"
            )
            assert nameless == 0, view
        light, ink = page.run(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        assert (sum(map(int, light[4:-1].split(","))) < sum(map(int, ink[4:-1].split(",")))) == dark
