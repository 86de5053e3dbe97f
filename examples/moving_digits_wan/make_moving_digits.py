"""Writes the moving_digits_wan example: clips of scanned digits that move, with captions, and a Wan2.1 folder of 1 M
parameters.

Run `python examples/moving_digits_wan/make_moving_digits.py [FOLDER]` (default `runs/moving_digits_wan`). Nothing is
downloaded; the same versions write the same bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from clips import DIRECTIONS, caption, draw_clip  # first: it finds the other example
from scans import NAMES, Scan, load_scans, split_scans
from tiny_wan import write_model_folder

from mindspeed_mm.fsdp.utils.media_files import write_video

GENERATORS_SPLITS = ("train", "validation")
FPS = 4
LOSSLESS = 0


def caption_of(scan: Scan, direction: str) -> str:
    """What the clip of a scan is called."""
    return caption(scan.digit, direction)


def write_split(
    name: str,
    scans: Sequence[Scan],
    folder: Path,
    draw_clip: Callable[[np.ndarray, str], np.ndarray] = draw_clip,
    caption_of: Callable[[Scan, str], str] = caption_of,
) -> None:
    """Write `<name>.jsonl` and its clips, one a scan; of each digit, every other scan goes left.

    Args:
        name: Of the split.
        scans: That move.
        folder: Where.
        draw_clip: The clip (5, 16, 16) uint8 of a picture (8, 8) in a direction.
        caption_of: What is asked.
    """
    (folder / "clips" / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for number, scan in enumerate(scans):
        direction = list(DIRECTIONS)[number % len(DIRECTIONS)]
        clip = f"clips/{name}/{scan.index:04d}-{direction}.mp4"
        frames = np.repeat(draw_clip(scan.picture, direction)[..., None], 3, axis=-1)
        write_video(folder / clip, frames, FPS, crf=LOSSLESS)
        lines.append(json.dumps({"path": clip, "cap": caption_of(scan, direction)}) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def make_data(folder: Path) -> dict[str, int]:
    """Write rows, clips and `prompts.txt`; returns the number of rows of each split."""
    splits = split_scans(load_scans())
    for name in GENERATORS_SPLITS:
        write_split(name, splits[name], folder)
    prompts = [caption(digit, direction) for digit in range(len(NAMES)) for direction in DIRECTIONS]
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in prompts), encoding="utf-8")
    return {name: len(splits[name]) for name in GENERATORS_SPLITS}


def main() -> None:
    """Write the example and say what it is."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/moving_digits_wan")
    rows = make_data(folder / "data")
    parameters = write_model_folder(folder / "model")
    print(f"{folder}/data   " + ", ".join(f"{count:,} {name} clips" for name, count in rows.items()))
    print(f"{folder}/model  a Wan2.1 of {parameters / 1e6:.1f} M parameters, still without weights")


if __name__ == "__main__":
    main()
