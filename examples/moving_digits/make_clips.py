"""Writes the moving_digits example: clips of scanned digits that move, with questions, and a tiny Qwen3-VL folder.

Run `python examples/moving_digits/make_clips.py [FOLDER]` (default `runs/moving_digits`). Nothing is
downloaded; the same versions write the same bytes. A scan belongs to one split only: no test clip shows a scan that was
trained on.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mindspeed_mm.fsdp.utils.media_files import write_video
from mindspeed_mm.quickstart.make_digits import DIGIT_PIXELS, Scan, jittered, load_scans, split_scans
from mindspeed_mm.quickstart.scans import NAMES, SEED
from mindspeed_mm.quickstart.tiny_model import write_model_folder

CANVAS, DIGIT_WIDTH = DIGIT_PIXELS, DIGIT_PIXELS // 2
FRAMES, FPS = 4, 2
REST = 2
"""The digit rests for two frames at each place: the model sees two frames at a time."""
LOSSLESS = 0
PAPER = 255
ROUNDS = {"train": 3, "validation": 1, "test": 1}
WAYS = ("left", "right")
QUESTIONS = {
    "which digit": ("Which digit is moving?", "Name the digit.", "What digit do you see?"),
    "which way": ("Which way does it go?", "Where does the digit move?", "In which direction does it move?"),
}


def draw_clip(picture: Image.Image, way: str) -> np.ndarray:
    """The digit crosses a white canvas from one half to the other.

    Args:
        picture: 32 × 32, grey, dark ink on white; drawn half as wide.
        way: One of `WAYS`.

    Returns:
        (4, 32, 32, 3) uint8.
    """
    clip, digit = [], picture.resize((DIGIT_WIDTH, CANVAS), Image.Resampling.BICUBIC)
    for number in range(FRAMES):
        is_right = (number >= REST) == (way == "right")
        frame = Image.new("L", (CANVAS, CANVAS), PAPER)
        frame.paste(digit, (DIGIT_WIDTH if is_right else 0, 0))
        clip.append(np.repeat(np.asarray(frame)[..., None], 3, axis=-1))
    return np.stack(clip)


def rows_of(name: str, scans: Sequence[Scan], folder: Path) -> Iterator[dict[str, Any]]:
    """Draw a clip of every scan in each round, and ask both questions about it."""
    draw = random.Random(f"{SEED}/{name}")
    for turn in range(ROUNDS[name]):
        for scan in scans:
            way = draw.choice(WAYS)
            picture = jittered(scan.picture, draw) if name == "train" else scan.picture
            clip = f"clips/{name}/{scan.index:04d}-{turn}-{way}.mp4"
            write_video(folder / clip, draw_clip(picture, way), FPS, crf=LOSSLESS)
            for task, answer in (("which digit", NAMES[scan.digit]), ("which way", way)):
                question = "<video>" + draw.choice(QUESTIONS[task])
                messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                yield {"id": f"{clip} {task}", "task": task, "messages": messages, "videos": [clip]}


def make_data(folder: Path) -> dict[str, int]:
    """Write rows and clips; returns the number of rows of each split."""
    counts = {}
    for name, scans in split_scans(load_scans()).items():
        (folder / "clips" / name).mkdir(parents=True, exist_ok=True)
        rows = list(rows_of(name, scans, folder))
        random.Random(SEED).shuffle(rows)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        counts[name] = len(rows)
    return counts


def main() -> None:
    """Write the example and say what it is."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/moving_digits")
    rows = make_data(folder / "data")
    texts = [text for questions in QUESTIONS.values() for text in questions] + [*NAMES, *WAYS, "user\n", "assistant\n"]
    write_model_folder(folder / "model", texts)
    print(f"{folder}/data   " + ", ".join(f"{count:,} {name} rows" for name, count in rows.items()))
    print(f"{folder}/model  a tiny Qwen3-VL, still without weights")


if __name__ == "__main__":
    main()
