"""The documentation as a reader meets it: links and anchors that lead somewhere, an index that lists every page, first
screens with a command and short sentences, and pages in Chinese that keep to their English twins."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "benchmarks" / "README.md",
    *sorted(DOCS.glob("**/*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
"""What the site holds."""
TWINS = {
    "zh/pytorch/installation.md": "installation.md",
    "zh/pytorch/quick-start.md": "quick-start.md",
    "zh/pytorch/fine-tune.md": "fine-tune.md",
    "zh/pytorch/own-functions.md": "own-functions.md",
    "zh/pytorch/provider.md": "provider.md",
    "zh/features/README.md": "features.md",
}
"""Page in Chinese → the English page that it translates, both below `docs/`."""
FIRST_SCREEN = 40
"""Lines of a page that are seen without scrolling, about."""
LONGEST_SENTENCE = 25
OPENINGS = [ROOT / "README.md", *(page for page in sorted(DOCS.glob("*.md")) if page.name != "README.md")]
"""Pages whose first screen is held to a command and short sentences."""

# --- links ------------------------------------------------------------------------------------------------------------


def without_blocks(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```\n?", "", text, flags=re.DOTALL | re.MULTILINE)


def anchor_of_heading(heading: str) -> str:
    """What a code host and the site make of a heading: lower case, spaces as hyphens, no punctuation."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")


def anchors_of(text: str) -> set[str]:
    """Anchors of a page's headings; a heading that comes again has a number."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#{1,6} (.*)$", without_blocks(text), flags=re.MULTILINE):
        slug = anchor_of_heading(heading)
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def dead_links(page: Path, text: str) -> list[str]:
    """Links of a page to a file or a heading that does not exist."""
    dead = []
    for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", without_blocks(text)):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists():
            dead.append(link)
            continue
        headings = text if target == page else target.read_text(encoding="utf-8") if anchor else ""
        if anchor and anchor not in anchors_of(headings):
            dead.append(link)
    return dead


def test_links_and_anchors_lead_somewhere() -> None:
    dead = {str(page.relative_to(ROOT)): dead_links(page, page.read_text(encoding="utf-8")) for page in PAGES}
    assert {page: links for page, links in dead.items() if links} == {}


def test_a_dead_link_would_be_found() -> None:
    good = "# New\n\n## Two words, `code`\n\n[a](#two-words-code) [b](quick-start.md#further-commands) [c](data.md)"
    bad = "[d](none.md) [e](#two) [f](quick-start.md#more)"
    assert dead_links(DOCS / "README.md", good + bad) == ["none.md", "#two", "quick-start.md#more"]


# --- index and navigation ---------------------------------------------------------------------------------------------


def groups_of_index() -> dict[str, list[Path]]:
    """What the site reads its navigation from."""
    spec = importlib.util.spec_from_file_location("navigation", DOCS / "site" / "navigation.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    groups: dict[str, list[Path]] = module.read_groups()
    return groups


def test_the_index_lists_every_page_once() -> None:
    groups = groups_of_index()
    assert list(groups) == ["Start", "Data and models", "Train", "Use and evaluate", "Inside", "中文"]
    listed = Counter(page for pages in groups.values() for page in pages)
    assert {str(page): count for page, count in listed.items() if count > 1} == {}
    assert set(DOCS.glob("**/*.md")) - set(listed) == {DOCS / "README.md"}
    assert [str(page) for page in listed if not page.is_file()] == []


# --- first screens ----------------------------------------------------------------------------------------------------


def long_sentences(text: str) -> list[str]:
    """Sentences of the first screen that are too long. A cell of a table and an item of a list end a sentence."""
    screen = "\n".join(text.splitlines()[:FIRST_SCREEN])
    prose = re.sub(r"^```.*?(^```|\Z)", "\n\n", screen, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    prose = re.sub(r"`[^`\n]+`", "code", prose)
    pieces = re.split(r"\n\s*\n|\n(?=[-|#]|\d+\. )|\||(?<=[.!?:])\s", prose)
    sentences = [" ".join(piece.split()) for piece in pieces]
    return [each for each in sentences if len(re.findall(r"\w[\w'’.,-]*", each)) > LONGEST_SENTENCE]


@pytest.mark.parametrize("page", OPENINGS, ids=lambda page: page.name)
def test_a_page_opens_with_a_command_in_short_sentences(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n", "\n".join(text.splitlines()[:FIRST_SCREEN]) + "\n", flags=re.MULTILINE)
    assert {"sh", "bash", "python"} & set(blocks), "no command on the first screen"
    assert long_sentences(text) == []


def test_a_long_sentence_would_be_found() -> None:
    assert long_sentences("# A\n\n" + "word " * 25 + "end.\n\n" + "word " * 24 + "end.") == ["word " * 25 + "end."]
    assert long_sentences("| " + "word " * 20 + "| " + "word " * 20 + "|\n") == []


# --- Chinese ----------------------------------------------------------------------------------------------------------


def blocks_of(text: str) -> list[str]:
    """Fenced blocks of a page without the comments in them."""
    found = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [re.sub(r"\s*#.*", "", block) for block in found]


def test_every_page_in_chinese_has_a_twin() -> None:
    assert {page.relative_to(DOCS).as_posix() for page in (DOCS / "zh").glob("**/*.md")} == set(TWINS)


@pytest.mark.parametrize("chinese", TWINS)
def test_a_page_in_chinese_has_the_commands_and_keys_of_its_twin(chinese: str) -> None:
    """Their blocks are the same but for comments, and so are the names in code type and the structure of headings."""
    texts = [(DOCS / name).read_text(encoding="utf-8") for name in (chinese, TWINS[chinese])]
    blocks = [blocks_of(text) for text in texts]
    assert blocks[0] == blocks[1]
    keys = [set(re.findall(r"`([^`\n]+)`", without_blocks(text))) for text in texts]
    assert keys[0] ^ keys[1] == set()
    levels = [re.findall(r"^(#+) ", without_blocks(text), flags=re.MULTILINE) for text in texts]
    assert levels[0] == levels[1]
