"""The documentation site: its packages are pinned. Where they are installed (`make docs` does it), it is built without
a warning, needs no other host, and its search finds pages from the disk in a real browser."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.browser import browser, find_chromium
from tests.test_constraints import pins_of
from tests.test_docs import PAGES, ROOT, groups_of_index

OUTSIDE = re.compile(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="(?:https?:)?//|<link\b[^>]*\bhref="(?:https?:)?//')
"""What a browser would fetch from another host when a page is opened."""


def test_the_packages_of_the_site_are_pinned() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = pins_of("constraints.txt")
    for each in map(Requirement, extras["docs"]):
        assert pins[canonicalize_name(each.name)] in each.specifier, each.name


def test_what_another_host_would_serve_is_found() -> None:
    assert OUTSIDE.search('<script async src="https://cdn.example/x.js">')
    assert OUTSIDE.search('<link rel="stylesheet" href="//fonts.example/a.css">')
    assert not OUTSIDE.search('<a href="https://example.org">x</a><link rel="stylesheet" href="../_static/a.css">')


def python_with_sphinx() -> Path | None:
    """The interpreter that can build the site: this one, or that of `make docs`."""
    if all(importlib.util.find_spec(name) for name in ("sphinx", "myst_parser", "furo", "sphinx_copybutton")):
        return Path(sys.executable)
    made = ROOT / ".venv-docs" / "bin" / "python"
    return made if made.exists() else None


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = python_with_sphinx()
    if python is None:
        pytest.skip("the extra docs is not installed; make docs installs it")
    folder = tmp_path_factory.mktemp("site")
    words = [python, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", "docs/site", ".", folder]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_every_page_and_needs_no_other_host(site: Path) -> None:
    assert (site / "index.html").read_text() == (site / "README.html").read_text()
    listed = {page for pages in groups_of_index().values() for page in pages}
    for page in PAGES:
        html = (site / page.relative_to(ROOT).with_suffix(".html")).read_text(encoding="utf-8")
        assert not OUTSIDE.search(html), page
    menu = re.findall(r'toctree-l1[^"]*"><a[^>]*href="([^"#]+)"', (site / "README.html").read_text(encoding="utf-8"))
    assert {(ROOT / link).with_suffix(".md") for link in menu} == listed
    styles = [*site.rglob("*.css"), *site.rglob("*.js")]
    assert styles
    assert [path.name for path in styles if re.search(r"@import|url\(\W?https?:", path.read_text())] == []


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed")
def test_the_site_is_readable_and_searchable_from_the_disk(site: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        grounds = set()
        for width in (390, 1280):
            for scheme in ("light", "dark"):
                page.look(width, 900, dark=scheme == "dark")
                for name in ("index.html", "docs/generation.html", "docs/zh/features/README.html"):
                    page.open((site / name).as_uri())
                    page.wait_until(f"document.readyState == 'complete' && location.href.endsWith('{name}')")
                    assert page.run("document.documentElement.scrollWidth") <= width
                grounds.add((scheme, page.run("getComputedStyle(document.body).backgroundColor")))
        assert len(grounds) == 2
        for words, found in {
            "reshard_after_forward": "parallelism",
            "重计算": "zh/features",
            "torchrun": "multi-host",
        }.items():
            page.open(f"{(site / 'search.html').as_uri()}?q={words}")
            page.wait_until("document.querySelector('#search-results li a') !== null")
            time.sleep(1)  # results are listed one after the other
            links = page.run("[...document.querySelectorAll('#search-results li a')].map(a => a.href).join(' ')")
            assert found in links, (words, links)
        assert page.problems == []
