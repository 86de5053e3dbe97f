"""Writes the digits example: 1,797 scanned digits as image conversations, and the folder of a tiny Qwen3-VL.

`mm quickstart` does this first; `python examples/digits/make_digits.py [FOLDER] [--experts N] [--layers N]` does it
alone (default `runs/digits`, a dense model of two layers). The same seed writes the same rows. A scan belongs to one
split only, alone or next to others, so no test picture shows a scan of the training rows. Training pictures are rotated
and shifted slightly at random; the others are the unchanged scans.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from mindspeed_mm.core.artifacts import atomic_write_text, read_jsonl, sha256_file
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.quickstart.folder import MARK, check_folder
from mindspeed_mm.quickstart.scans import MOST_INK, NAMES, SEED, deal_scans, load_ink
from mindspeed_mm.quickstart.tiny_model import LAYERS, write_model_folder

SPLITS = {"train": 0.75, "validation": 0.05, "test": 0.20}
SINGLE_ROUNDS = {"train": 2, "validation": 1, "test": 1}
READING_ROWS = {"train": 4000, "validation": 90, "test": 360}
DIGIT_PIXELS = 32
HERE = Path(__file__).parent
QUESTIONS = {
    "naming": ("Which digit is this?", "Name the digit.", "What digit do you see?"),
    "odd-or-even": ("Is the digit odd or even?", "Odd or even?"),
    "reading": ("Read the digits from left to right.", "Which digits are these, from left to right?"),
}


class Scan(NamedTuple):
    """One scanned digit: its index in the source, the digit it shows and the picture."""

    index: int  # type: ignore[assignment]  # tuples have a method of this name, which nobody asks of a scan
    digit: int
    picture: Image.Image


def load_scans() -> list[Scan]:
    """All scans in the order of the source, dark ink on white, enlarged from 8×8 to 32×32 pixels."""
    return [Scan(i, int(digit), as_picture(ink)) for i, (ink, digit) in enumerate(zip(*load_ink(), strict=True))]


def as_picture(ink: np.ndarray) -> Image.Image:
    """A grey picture of 32×32 pixels from an 8×8 array of ink, 0 to 16."""
    grey = Image.fromarray((255 - ink * (255 / MOST_INK)).round().astype("uint8"))
    return grey.resize((DIGIT_PIXELS, DIGIT_PIXELS), Image.Resampling.BICUBIC)


split_scans = functools.partial(deal_scans, shares=SPLITS)


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


def conversation(task: str, group: list[Scan], image: str, rng: random.Random) -> JsonObject:
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
    messages = [message for row in read_jsonl(data_folder / "train.jsonl") for message in row["messages"]]
    return [f"{message['role']}\n{message['content'].removeprefix('<image>')}" for message in messages]


def make_digits(folder: Path, seed: int = SEED, experts: int = 0, layers: int = LAYERS) -> dict[str, int]:
    """Write `folder/data` and `folder/model`, and `folder/made-by.txt` that says by which recipe.

    Args:
        folder: Is made if it is not there.
        seed: Of the splits, the questions and the jitter.
        experts: Of each text layer; 0: a dense model.
        layers: Of the text model.

    Returns:
        The number of rows of each split.

    Raises:
        UsageError: The folder holds files that this did not write.
    """
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / MARK
    atomic_write_text(mark, "unfinished\n")  # a run that is killed from here on may be repeated in the same folder
    splits = split_scans(load_scans(), seed=seed)
    rows = {name: write_split(name, scans, folder / "data", seed) for name, scans in splits.items()}
    write_model_folder(folder / "model", training_texts(folder / "data"), experts, layers)
    atomic_write_text(mark, recipe_of(seed, experts, layers))
    return rows


def is_made(folder: Path) -> bool:
    """Whether this very recipe has written the data and the dense model of two layers there."""
    mark = folder / MARK
    return mark.is_file() and mark.read_text(encoding="utf-8") == recipe_of()


def recipe_of(seed: int = SEED, experts: int = 0, layers: int = LAYERS) -> str:
    """A text that changes with the code that makes data and model, and with what it was asked for."""
    hashes = [sha256_file(HERE / name) for name in ("make_digits.py", "scans.py", "tiny_model.py")]
    recipe = hashlib.sha256("".join(hashes).encode()).hexdigest()
    return f"{recipe} seed={seed} experts={experts} layers={layers}\n"


def describe(folder: Path, rows: dict[str, int], experts: int = 0, layers: int = LAYERS) -> str:
    """Two lines that say what was written."""
    counts = ", ".join(f"{count:,} {name} rows" for name, count in rows.items())
    kind = f"{layers} text layers" + (f" of {experts} experts" if experts else "")
    return (
        f"{folder / 'data'}   {counts} (seed {SEED})\n{folder / 'model'}  a tiny Qwen3-VL ({kind}), without weights yet"
    )
