"""Writes the bagel_digits example: questions about scanned digits whose answers are words or pictures, and a BAGEL
folder of 1.5 M parameters.

Run `python examples/bagel_digits/make_bagel_digits.py [FOLDER]` (default `runs/bagel_digits`). Nothing is downloaded;
the same versions write the same bytes.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from edits_of_digits import TASKS, Row, asked_rows, training_rows  # first: it finds the other examples
from PIL import Image
from scans import NAMES, load_scans, split_scans
from small_bagel import write_model_folder

ROUNDS = 4
"""How often a scan is read, and the result of another."""
DRAWS = 10
"""Of each digit, which are judged."""
SEED = 0


def row_of(row: Row, number: int, folder: Path) -> dict[str, Any]:
    """A row as the data set has it; its pictures are written."""
    images, answer = [], NAMES[row.digit]
    if row.source is not None:
        images.append(save(*row.source, folder))
    if row.answer is not None:
        answer = "<image>"
        images.append(save(*row.answer, folder))
    messages = [
        {"role": "user", "content": "<image>" * (row.source is not None) + row.asked},
        {"role": "assistant", "content": answer},
    ]
    facts = {"id": f"{row.task}-{number:05d}", "task": row.task, "digit": NAMES[row.digit]}
    return facts | {"messages": messages, "images": images}


def save(name: str, picture: np.ndarray, folder: Path) -> str:
    """Write a picture, unless it is there; returns its path in the folder."""
    path = f"images/{name}.png"
    if not (folder / path).exists():
        Image.fromarray(np.ascontiguousarray(picture)).save(folder / path)
    return path


def write_rows(path: Path, rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Write rows and their pictures; returns the rows."""
    written = [row_of(row, number, path.parent) for number, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
    return written


def make_data(folder: Path) -> dict[str, int]:
    """Write rows and pictures; returns how many rows of each task are trained, and how many are asked."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    splits = split_scans(load_scans())
    rows = list(training_rows(splits["train"], random.Random(f"{SEED}/train"), ROUNDS))
    for task in TASKS:
        write_rows(folder / f"{task}.jsonl", [row for row in rows if row.task == task])
    held_out = splits["validation"]
    write_rows(folder / "validation.jsonl", training_rows(held_out, random.Random(f"{SEED}/validation"), 1))
    asked = write_rows(folder / "asked.jsonl", asked_rows(held_out + splits["judge"], held_out, DRAWS))
    return dict(Counter(row.task for row in rows)) | {"asked": len(asked)}


def texts_of(folder: Path) -> list[str]:
    """All that is said in the rows of a data folder."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    messages = [message for line in lines for message in json.loads(line)["messages"]]
    return sorted({message["content"].replace("<image>", "") for message in messages})


def main() -> None:
    """Write the example and say what it is."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/bagel_digits")
    rows = make_data(folder / "data")
    parameters = write_model_folder(folder / "model", texts_of(folder / "data"))
    print(f"{folder}/data   " + ", ".join(f"{count:,} × {name}" for name, count in rows.items()))
    print(f"{folder}/model  a BAGEL of {parameters / 1e6:.1f} M parameters, still without weights")


if __name__ == "__main__":
    main()
