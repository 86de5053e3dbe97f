"""Draws the rooms of the package, floor by floor, from the import law: `python -m tests.architecture`.

The floors are those of the contract in `pyproject.toml`, the width of a room is its lines of code. The picture in
`docs/architecture.md` is this program's output; a test says when the two differ.
"""

from __future__ import annotations

import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
PACKAGE = "mindspeed_mm"
WIDTH, FLOOR, GAP, MARGIN = 960, 46, 8, 16
LEAST_ROOM = 104
COLOURS = ("#dbeafe", "#e0e7ff", "#ede9fe", "#fae8ff", "#fce7f3", "#ffe4e6", "#ffedd5", "#fef9c3", "#ecfccb", "#dcfce7",
           "#ccfbf1", "#cffafe")  # fmt: skip


def floors() -> list[list[str]]:
    """Rooms by floor, the highest first, as the import law has them."""
    law = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = [each["layers"] for each in law["tool"]["importlinter"]["contracts"] if each["type"] == "layers"]
    return [[room.strip().removeprefix(f"{PACKAGE}.") for room in layer.split("|")] for layer in layers]


def lines_of(room: str) -> int:
    """Lines in the files of a room."""
    path = ROOT / PACKAGE / room.replace(".", "/")
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def draw() -> str:
    """The picture as SVG."""
    rows = floors()
    height = 2 * MARGIN + len(rows) * (FLOOR + GAP) - GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, rooms in enumerate(rows):
        top = MARGIN + number * (FLOOR + GAP)
        parts += _floor(rooms, top, COLOURS[number % len(COLOURS)])
    return "\n".join([*parts, "</svg>", ""])


def _floor(rooms: list[str], top: int, colour: str) -> list[str]:
    """Boxes side by side, each as wide as its share of the floor's lines, but wide enough for its name."""
    lines = [lines_of(room) for room in rooms]
    free = WIDTH - 2 * MARGIN - GAP * (len(rooms) - 1) - LEAST_ROOM * len(rooms)
    left, parts = float(MARGIN), []
    for room, count in zip(rooms, lines, strict=True):
        width = LEAST_ROOM + free * count / sum(lines)
        middle = left + width / 2
        parts += [
            f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{FLOOR}" rx="6" fill="{colour}" '
            'stroke="#94a3b8"/>',
            f'<text x="{middle:.0f}" y="{top + 20}" text-anchor="middle" font-size="14">{escape(room)}</text>',
            f'<text x="{middle:.0f}" y="{top + 37}" text-anchor="middle" font-size="11" fill="#475569">'
            f"{round(count, -2):,} lines</text>",
        ]
        left += width + GAP
    return parts


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
