"""Clips of a scanned digit that leaves the middle of a black canvas: the first frame shows the digit, not the way."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "moving_digits_wan"))  # the canvas and its judges

from clips import CANVAS, DIRECTIONS, FRAMES  # first of the examples': it finds the scans
from scans import SIDE


def caption(way: str) -> str:
    """What is asked; which digit it is, the first frame alone says."""
    return f"it moves {way}"


def draw_clip(picture: np.ndarray, way: str) -> np.ndarray:
    """The digit goes from the middle to an edge, 1 pixel a frame.

    Args:
        picture: (8, 8) uint8.
        way: left or right.

    Returns:
        (5, 16, 16) uint8.
    """
    clip = np.zeros((FRAMES, CANVAS, CANVAS), dtype=np.uint8)
    middle = (CANVAS - SIDE) // 2
    for number in range(FRAMES):
        left = middle + number * DIRECTIONS[way]
        clip[number, middle : middle + SIDE, left : left + SIDE] = picture
    return clip
