"""Writes the digits_flux example: scanned digits as 8×8 pictures with captions, and a FLUX.1 folder of 2 M parameters.

Run `python examples/digits_flux/make_digits_flux.py [FOLDER]` (default `runs/digits_flux`). Nothing is downloaded; the
same versions write the same bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from scans import NAMES, Scan, load_scans, split_scans
from tiny_flux import write_model_folder

GENERATORS_SPLITS = ("train", "validation")


def caption(digit: int) -> str:
    """What a picture of a digit is called."""
    return f"a {NAMES[digit]}"


def write_split(name: str, scans: Sequence[Scan], folder: Path) -> None:
    """Write `<name>.jsonl` and its pictures."""
    (folder / "images" / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for scan in scans:
        image = f"images/{name}/{scan.index:04d}.png"
        Image.fromarray(scan.picture).save(folder / image)
        lines.append(json.dumps({"path": image, "cap": caption(scan.digit)}) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def make_data(folder: Path) -> dict[str, int]:
    """Write rows, pictures and `prompts.txt`; returns the number of rows of each split."""
    splits = split_scans(load_scans())
    for name in GENERATORS_SPLITS:
        write_split(name, splits[name], folder)
    prompts = "".join(f"{caption(digit)}\n" for digit in range(len(NAMES)))
    (folder / "prompts.txt").write_text(prompts, encoding="utf-8")
    return {name: len(splits[name]) for name in GENERATORS_SPLITS}


def main() -> None:
    """Write the example and say what it is."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/digits_flux")
    rows = make_data(folder / "data")
    parameters = write_model_folder(folder / "model")
    print(f"{folder}/data   " + ", ".join(f"{count:,} {name} pictures" for name, count in rows.items()))
    print(f"{folder}/model  a FLUX.1 of {parameters / 1e6:.1f} M parameters, still without weights")


if __name__ == "__main__":
    main()
