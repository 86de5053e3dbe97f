"""Writes the moving_digits_i2v example: clips of scanned digits that leave the middle, captions that say where to, and
a Wan2.1 folder of 1 M parameters that is given the first frame.

Run `python examples/moving_digits_i2v/make_moving_digits_i2v.py [FOLDER]` (default `runs/moving_digits_i2v`). Nothing
is downloaded; the same versions write the same bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from centred_clips import caption, draw_clip  # first: it finds the other examples
from clips import DIRECTIONS
from make_moving_digits import GENERATORS_SPLITS, write_split
from PIL import Image
from scans import Scan, load_scans, split_scans
from tiny_wan import write_model_folder as write_wan_folder

SHOWN_SCANS = 10
"""Of `shown.jsonl`, which is drawn while training."""
MASK_AND_FRAME = 2
CAPTION_TOKENS = 4
"""'it moves left' and its end."""


def write_prompts(scans: Sequence[Scan], folder: Path) -> None:
    """First frames of scans that nothing was trained on, each asked to go both ways."""
    (folder / "first").mkdir(exist_ok=True)
    lines = []
    for scan in scans:
        frame = f"first/{scan.index:04d}.png"
        Image.fromarray(draw_clip(scan.picture, "left")[0]).save(folder / frame)
        lines += [json.dumps({"prompt": caption(way), "image": frame}) + "\n" for way in DIRECTIONS]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "shown.jsonl").write_text("".join(lines[: SHOWN_SCANS * len(DIRECTIONS)]), encoding="utf-8")


def make_data(folder: Path) -> dict[str, int]:
    """Write rows, clips and prompts; returns the number of rows of each split."""
    splits = split_scans(load_scans())
    for name in GENERATORS_SPLITS:
        write_split(name, splits[name], folder, draw_clip, lambda _, direction: caption(direction))
    write_prompts(splits["validation"], folder)
    return {name: len(splits[name]) for name in GENERATORS_SPLITS}


def write_model_folder(folder: Path) -> int:
    """Write the folder; returns the transformer's number of parameters."""
    return write_wan_folder(
        folder,
        words=("it", "moves", *DIRECTIONS),
        caption_tokens=CAPTION_TOKENS,
        pipeline_name="WanImageToVideoPipeline",
        given_channels=MASK_AND_FRAME,
    )


def main() -> None:
    """Write the example and say what it is."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/moving_digits_i2v")
    rows = make_data(folder / "data")
    parameters = write_model_folder(folder / "model")
    print(f"{folder}/data   " + ", ".join(f"{count:,} {name} clips" for name, count in rows.items()))
    print(f"{folder}/model  a Wan2.1 of {parameters / 1e6:.1f} M parameters, still without weights")


if __name__ == "__main__":
    main()
