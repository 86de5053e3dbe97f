"""Clips of a scanned digit that crosses a black canvas, and what of a clip shows where it goes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "digits_flux"))  # the other example has scans and encoders

from scans import NAMES, SIDE

CANVAS = 16
FRAMES = 5
STEP_PIXELS = (CANVAS - SIDE) // (FRAMES - 1)
DIRECTIONS = {"left": -1, "right": 1}
INK = 0.1
"""Paler pixels do not count when a digit is looked for."""


def caption(digit: int, direction: str) -> str:
    """What a clip is called."""
    return f"a {NAMES[digit]} moving {direction}"


def draw_clip(picture: np.ndarray, direction: str) -> np.ndarray:
    """The digit crosses the canvas from edge to edge, 2 pixels a frame.

    Args:
        picture: (8, 8) uint8.
        direction: left or right.

    Returns:
        (5, 16, 16) uint8.
    """
    clip = np.zeros((FRAMES, CANVAS, CANVAS), dtype=np.uint8)
    top = (CANVAS - SIDE) // 2
    for number in range(FRAMES):
        left = STEP_PIXELS * (number if direction == "right" else FRAMES - 1 - number)
        clip[number, top : top + SIDE, left : left + SIDE] = picture
    return clip


def centre_of_ink(frame: np.ndarray) -> tuple[float, float]:
    """Row and column of the mean of a frame's ink; its middle when there is none.

    Args:
        frame: (16, 16) uint8.
    """
    ink = np.where(frame > 255 * INK, frame, 0).astype(float)
    if not ink.any():
        return (CANVAS - 1) / 2, (CANVAS - 1) / 2
    rows, columns = ink.sum(axis=1), ink.sum(axis=0)
    places = np.arange(CANVAS)
    return float(rows @ places / ink.sum()), float(columns @ places / ink.sum())


def cut_out(frame: np.ndarray) -> np.ndarray:
    """The (8, 8) window around a frame's ink, wherever the digit is."""
    row, column = centre_of_ink(frame)
    padded = np.pad(frame, SIDE)
    top, left = (round(centre - (SIDE - 1) / 2) + SIDE for centre in (row, column))
    return padded[top : top + SIDE, left : left + SIDE]


def direction_of(clip: np.ndarray) -> str | None:
    """Where the ink goes: left or right when it goes there in every frame by at least half a pixel, else None."""
    steps = np.diff([centre_of_ink(frame)[1] for frame in clip])
    for direction, sign in DIRECTIONS.items():
        if (steps * sign >= 0.5).all():
            return direction
    return None
