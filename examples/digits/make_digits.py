"""Writes the digits example: scikit-learn's 1,797 scanned digits as image conversations, and a tiny Qwen3-VL folder.

Run `python examples/digits/make_digits.py [FOLDER] [--experts N] [--layers N]` (default `runs/digits`, a dense model of
two layers). Nothing is downloaded; the same seed writes the same rows. A scan belongs to one split only, alone or
beside others, so no test picture shows a scan trained on. Training pictures are turned and moved a little, each its own
way; the others are the scans as they are.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from sklearn.datasets import load_digits
from tiny_model import LAYERS, write_model_folder

SEED = 0
SPLITS = {"train": 0.75, "validation": 0.05, "test": 0.20}
SINGLE_ROUNDS = {"train": 2, "validation": 1, "test": 1}
READING_ROWS = {"train": 4000, "validation": 90, "test": 360}
DIGIT_PIXELS = 32
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
QUESTIONS = {
    "naming": ("Which digit is this?", "Name the digit.", "What digit do you see?"),
    "odd-or-even": ("Is the digit odd or even?", "Odd or even?"),
    "reading": ("Read the digits from left to right.", "Which digits are these, from left to right?"),
}


class Scan(NamedTuple):
    """One scanned digit: its index in scikit-learn's data set, the digit it shows and the picture."""

    index: int  # type: ignore[assignment]  # tuples have a method of this name, which nobody asks of a scan
    digit: int
    picture: Image.Image


def load_scans() -> list[Scan]:
    """All scans in scikit-learn's order, dark ink on white, enlarged from 8×8 to 32×32 pixels."""
    bunch = load_digits()
    return [
        Scan(i, int(digit), as_picture(ink))
        for i, (digit, ink) in enumerate(zip(bunch.target, bunch.images, strict=True))
    ]


def as_picture(ink: Any) -> Image.Image:
    """An 8×8 array of ink, 0 to 16, as a grey picture."""
    grey = Image.fromarray((255 - ink * (255 / 16)).round().astype("uint8"))
    return grey.resize((DIGIT_PIXELS, DIGIT_PIXELS), Image.Resampling.BICUBIC)


def split_scans(scans: Iterable[Scan], seed: int = SEED) -> dict[str, list[Scan]]:
    """Deal the scans of every digit to the splits in their shares, by a shuffle with this seed."""
    by_digit: dict[int, list[Scan]] = defaultdict(list)
    for scan in scans:
        by_digit[scan.digit].append(scan)
    splits: dict[str, list[Scan]] = {name: [] for name in SPLITS}
    for digit, same in sorted(by_digit.items()):
        random.Random(f"{seed}/{digit}").shuffle(same)
        start, share = 0, 0.0
        for name in SPLITS:
            share += SPLITS[name]
            end = round(share * len(same))
            splits[name] += same[start:end]
            start = end
    return splits


def write_split(name: str, scans: list[Scan], folder: Path, seed: int = SEED) -> int:
    """Write `<name>.jsonl` and its pictures; returns the number of rows."""
    rng = random.Random(f"{seed}/{name}")
    (folder / "images" / name).mkdir(parents=True, exist_ok=True)
    shown = [*singles(scans, SINGLE_ROUNDS[name]), *side_by_side(scans, READING_ROWS[name], rng)]
    rng.shuffle(shown)
    lines = []
    for number, (task, group) in enumerate(shown):
        image = f"images/{name}/{number:05d}-{'-'.join(str(scan.index) for scan in group)}.png"
        draw(group, rng if name == "train" else None).save(folder / image)
        lines.append(json.dumps({"id": f"{name}-{number:05d}", **conversation(task, group, image, rng)}) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return len(lines)


def singles(scans: list[Scan], rounds: int) -> Iterator[tuple[str, list[Scan]]]:
    """Every scan alone, once a round for each of the two tasks."""
    for scan in scans * rounds:
        yield "naming", [scan]
        yield "odd-or-even", [scan]


def side_by_side(scans: list[Scan], count: int, rng: random.Random) -> Iterator[tuple[str, list[Scan]]]:
    """Two or three scans in turn, each scan about equally often."""
    pool: list[Scan] = []
    for number in range(count):
        width = 2 + number % 2
        if len(pool) < width:
            pool += rng.sample(scans, len(scans))
        group, pool = pool[:width], pool[width:]
        yield "reading", group


def conversation(task: str, group: list[Scan], image: str, rng: random.Random) -> dict[str, Any]:
    """A question about the picture and its answer, as a row of the data set."""
    digit = group[0].digit
    answers = {
        "naming": NAMES[digit],
        "odd-or-even": "odd" if digit % 2 else "even",
        "reading": " ".join(str(scan.digit) for scan in group),
    }
    question = "<image>" + rng.choice(QUESTIONS[task])
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answers[task]}]
    return {"task": task, "messages": messages, "images": [image]}


def draw(group: list[Scan], jitter: random.Random | None) -> Image.Image:
    """The scans side by side, each turned and moved a little when `jitter` is given."""
    strip = Image.new("L", (DIGIT_PIXELS * len(group), DIGIT_PIXELS))
    for place, scan in enumerate(group):
        picture = scan.picture if jitter is None else jittered(scan.picture, jitter)
        strip.paste(picture, (place * DIGIT_PIXELS, 0))
    return strip


def jittered(picture: Image.Image, rng: random.Random) -> Image.Image:
    """Turned by up to 8 degrees and moved by up to 1.5 pixels each way; white comes in at the edges."""
    angle, shift = rng.uniform(-8, 8), (rng.uniform(-1.5, 1.5), rng.uniform(-1.5, 1.5))
    return picture.rotate(angle, Image.Resampling.BILINEAR, translate=shift, fillcolor=255)  # type: ignore[arg-type]  # parts of pixels are taken


def training_texts(data_folder: Path) -> list[str]:
    """Every role, question and answer of the training rows: what the tokenizer learns from."""
    lines = (data_folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    messages = [message for line in lines for message in json.loads(line)["messages"]]
    return [f"{message['role']}\n{message['content'].removeprefix('<image>')}" for message in messages]


def make_digits(folder: Path, seed: int = SEED, experts: int = 0, layers: int = LAYERS) -> dict[str, int]:
    """Write `folder/data` and `folder/model`; returns the number of rows of each split."""
    splits = split_scans(load_scans(), seed)
    rows = {name: write_split(name, scans, folder / "data", seed) for name, scans in splits.items()}
    write_model_folder(folder / "model", training_texts(folder / "data"), experts, layers)
    return rows


def main() -> None:
    """Write the example and say what it is."""
    parser = argparse.ArgumentParser(description="Write the digits example.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/digits"))
    parser.add_argument("--experts", type=int, default=0, help="of each text layer; 0: a dense model")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the text model")
    chosen = parser.parse_args()
    folder, experts = chosen.folder, chosen.experts
    rows = make_digits(folder, experts=experts, layers=chosen.layers)
    print(f"{folder}/data   " + ", ".join(f"{count:,} {name} rows" for name, count in rows.items()) + f" (seed {SEED})")
    kind = f"{chosen.layers} text layers" + (f" of {experts} experts" if experts else "")
    print(f"{folder}/model  a tiny Qwen3-VL ({kind}), still without weights")


if __name__ == "__main__":
    main()
