"""Writes the digits_edit example: pairs of digits with what was asked of the first, and a FLUX.1 Kontext
folder of 2 M parameters.

Run `python examples/digits_edit/make_digits_edit.py [FOLDER]` (default `runs/digits_edit`). Nothing is downloaded; the
same versions write the same bytes.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from edits import PAPERS, caption, on_paper  # first: it finds the other example
from PIL import Image
from scans import NAMES, Scan, load_scans, split_scans
from tiny_flux import write_model_folder as write_flux_folder

GENERATORS_SPLITS = ("train", "validation")
SHOWN_PROMPTS = 20
"""Of `shown.jsonl`, which is drawn while training."""
SOURCES = 40
"""That are judged, each in every digit."""
CAPTION_TOKENS = 5
"""'make it a seven' and its end."""
PIXELS = (0.0, 0.84)
"""Mean and deviation of scans on both papers, in −1..1."""
SEED = 0


def save_picture(scan: Scan, paper: str, folder: Path, place: str) -> str:
    """Write a scan on a paper; returns its path in the folder."""
    path = f"{place}/{scan.index:04d}-{paper}.png"
    Image.fromarray(on_paper(scan.picture, paper)).save(folder / path)
    return path


def write_split(name: str, scans: Sequence[Scan], folder: Path) -> None:
    """Write `<name>.jsonl`: every scan is the target once, from any other as the source, on the same paper."""
    (folder / "images" / name).mkdir(parents=True, exist_ok=True)
    lines, draw = [], random.Random(f"{SEED}/{name}")
    for scan in scans:
        source, paper = draw.choice(scans), draw.choice(PAPERS)
        row = {
            "path": save_picture(scan, paper, folder, f"images/{name}"),
            "source": save_picture(source, paper, folder, f"images/{name}"),
            "cap": caption(scan.digit),
        }
        lines.append(json.dumps(row) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def write_prompts(scans: Sequence[Scan], folder: Path) -> None:
    """Sources that nothing was trained on, with what is asked of them."""
    (folder / "sources").mkdir(exist_ok=True)
    lines, draw = [], random.Random(f"{SEED}/prompts")
    for scan in draw.sample(scans, min(SOURCES, len(scans))):
        picture = save_picture(scan, draw.choice(PAPERS), folder, "sources")
        lines += [json.dumps({"prompt": caption(digit), "image": picture}) + "\n" for digit in range(len(NAMES))]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "shown.jsonl").write_text("".join(lines[:SHOWN_PROMPTS]), encoding="utf-8")


def make_data(folder: Path) -> dict[str, int]:
    """Write rows, pictures and prompts; returns the number of rows of each split."""
    splits = split_scans(load_scans())
    for name in GENERATORS_SPLITS:
        write_split(name, splits[name], folder)
    write_prompts(splits["validation"], folder)
    return {name: len(splits[name]) for name in GENERATORS_SPLITS}


def write_model_folder(folder: Path) -> int:
    """Write the folder; returns the transformer's number of parameters."""
    return write_flux_folder(
        folder,
        words=("make", "it", "a", *NAMES),
        caption_tokens=CAPTION_TOKENS,
        pipeline_name="FluxKontextPipeline",
        pixels=PIXELS,
    )


def main() -> None:
    """Write the example and say what it is."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/digits_edit")
    rows = make_data(folder / "data")
    parameters = write_model_folder(folder / "model")
    print(f"{folder}/data   " + ", ".join(f"{count:,} {name} pairs" for name, count in rows.items()))
    print(f"{folder}/model  a FLUX.1 Kontext of {parameters / 1e6:.1f} M parameters, still without weights")


if __name__ == "__main__":
    main()
