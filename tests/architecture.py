"""Draws the packages layer by layer: `python -m tests.architecture`.

The layers are those of the import contract in `pyproject.toml`; a box holds the first sentence of the docstring of its
package. The picture in `docs/architecture.md` is what this program draws; a test says when the two differ.
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
PACKAGE = "mindspeed_mm"
WIDTH, GAP, MARGIN, PADDING = 960, 5, 8, 6
NAME_LINE, LINE = 17, 13
"""Heights of the name and of a line of text, in pixels."""
LETTER = 5.6
"""Width of a letter of the text, in pixels."""
COLOURS = ("#dbeafe", "#e0e7ff", "#ede9fe", "#fae8ff", "#fce7f3", "#ffe4e6", "#ffedd5", "#fef9c3", "#ecfccb", "#dcfce7",
           "#ccfbf1", "#cffafe")  # fmt: skip


def floors() -> list[list[str]]:
    """Packages by layer, the highest first, as the import contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = [each["layers"] for each in contracts["tool"]["importlinter"]["contracts"] if each["type"] == "layers"]
    return [[room.strip().removeprefix(f"{PACKAGE}.") for room in layer.split("|")] for layer in layers]


def purpose_of(room: str) -> str:
    """The first sentence of a package's docstring."""
    path = ROOT / PACKAGE / room.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return re.split(r"\.(?:\s|$)", " ".join(docstring.split()))[0].replace("`", "")


def draw() -> str:
    """The picture as SVG."""
    boxes: list[str] = []
    top = MARGIN
    for number, rooms in enumerate(floors()):
        height, drawn = _layer(rooms, top, COLOURS[number % len(COLOURS)])
        boxes += drawn
        top += height + GAP
    height = top - GAP + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            *boxes,
            "</svg>",
            "",
        ]
    )


def _layer(rooms: list[str], top: int, colour: str) -> tuple[int, list[str]]:
    """The height of a layer and its boxes, all of one width; a box that is alone has name and text on one line."""
    width = (WIDTH - 2 * MARGIN - GAP * (len(rooms) - 1)) // len(rooms)
    if len(rooms) == 1:
        height = NAME_LINE + PADDING
        return height, [
            _box(MARGIN, top, width, height, colour),
            *_line(MARGIN + PADDING, top + NAME_LINE, rooms[0], purpose_of(rooms[0])),
        ]
    letters = int((width - 2 * PADDING) / LETTER)
    texts = {room: textwrap.wrap(purpose_of(room), letters) for room in rooms}
    height = NAME_LINE + LINE * max(map(len, texts.values())) + PADDING
    drawn = []
    for number, (room, lines) in enumerate(texts.items()):
        left = MARGIN + number * (width + GAP)
        drawn.append(_box(left, top, width, height, colour))
        drawn += _line(left + PADDING, top + NAME_LINE, room, "")
        for below, line in enumerate(lines, start=1):
            drawn.append(_text(left + PADDING, top + NAME_LINE + below * LINE, line))
    return height, drawn


def _box(left: int, top: int, width: int, height: int, colour: str) -> str:
    return f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="4" fill="{colour}" stroke="#94a3b8"/>'


def _line(left: int, baseline: int, name: str, text: str) -> list[str]:
    named = f'<text x="{left}" y="{baseline}" font-size="13" font-weight="bold">{escape(name)}</text>'
    return [named, _text(left + 130, baseline, text)] if text else [named]


def _text(left: int, baseline: int, text: str) -> str:
    return f'<text x="{left}" y="{baseline}" font-size="11" fill="#334155">{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
