"""The order of the documentation's pages, read from the tables of `docs/README.md`: the site and the tests take it from
there, so that a page is listed once."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs" / "README.md"
_LINK = re.compile(r"\]\(([^)#:]+\.md)\)")


def read_groups(index: Path = INDEX) -> dict[str, list[Path]]:
    """Read the groups of pages from the index.

    A group is a second-level heading. Its pages are the links to Markdown files in the first column of its table.

    Args:
        index: The Markdown file with one table for each group.

    Returns:
        Heading of a group → its pages, as absolute paths in reading order.
    """
    groups: dict[str, list[Path]] = {}
    for section in re.split(r"^## ", index.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading, *lines = section.splitlines()
        cells = [line.split("|")[1] for line in lines if line.startswith("|")]
        groups[heading] = [(index.parent / link).resolve() for cell in cells for link in _LINK.findall(cell)]
    return groups
