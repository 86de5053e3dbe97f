"""How many rows, optimizer steps and processes a setup has, as far as its files are here to be counted."""

from __future__ import annotations

import re
from pathlib import Path

from mindspeed_mm.core.json_file import JsonObject, parse_json
from mindspeed_mm.tasks.importing.draft import BASIC, DATASET, PeerSetup, path_of

_MEDIA = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif", ".jxl", ".gif", ".mp4", ".mov", ".avi", ".mkv", ".webm")


_MOST_ROWS_BYTES = 200_000_000
"""Of a file whose rows are counted, to turn shares of an epoch into steps."""


def count_rows(draft: PeerSetup) -> int | None:
    """How many rows the setup trains on, where its files are here and small enough to be counted."""
    entries = draft.out.get(DATASET)
    names = entries or []
    if isinstance(names, str):
        names = names.split(",")
    total = 0
    for entry in names:
        if draft.tool.is_for_generators and (media := media_in(entry)):
            total += media
            continue
        file = _file_of(draft, entry)
        if file is None or file.stat().st_size > _MOST_ROWS_BYTES or file.suffix not in (".jsonl", ".json"):
            return None
        most = draft.out.get(f"{BASIC}.max_samples")
        if isinstance(entry, dict):
            most = entry.get("max_samples")
        rows = _rows_in(file)
        if rows is None:
            return None
        total += min(rows, most or rows)
    return total or None


def media_in(entry: object) -> int:
    """How many media an epoch takes from a folder; kohya's `10_dog` inside it takes each ten times."""
    folder = Path(path_of(entry))
    if not folder.is_dir():
        return 0
    repeats = 1
    if isinstance(entry, dict):
        repeats = int(entry.get("repeats", 1))
    total = 0
    for path in (each for each in folder.rglob("*") if each.suffix.lower() in _MEDIA):
        of_folder = re.match(r"(\d+)_", path.parent.name)
        if of_folder and path.parent != folder:
            total += int(of_folder[1])
        else:
            total += repeats
    return total


def first_row(draft: PeerSetup) -> JsonObject:
    """The first row that the setup trains on; empty where its file is not here, or no JSON."""
    entries = draft.out.get(DATASET)
    first = entries
    if isinstance(entries, list) and entries:
        first = entries[0]
    file = _file_of(draft, first)
    if file is None and (folder := Path(path_of(first))).is_dir():
        file = min(folder.rglob("*.json*"), default=None)
    if file is None or file.suffix not in (".jsonl", ".json") or file.stat().st_size > _MOST_ROWS_BYTES:
        return {}
    with file.open("rb") as stream:
        if file.suffix == ".jsonl":
            content = stream.readline()
        else:
            content = stream.read()
    try:
        row = parse_json(content)
    except ValueError:
        return {}
    if isinstance(row, list) and row:
        row = row[0]
    if isinstance(row, dict):
        return row
    return {}


def _file_of(draft: PeerSetup, entry: object) -> Path | None:
    """The file of rows that an entry of `dataset` names, where it is here."""
    name = path_of(entry)
    found = [Path(name), Path(str(draft.out.get(f"{BASIC}.dataset_dir", "data"))) / name]
    return next((each for each in found if each.is_file()), None)


def _rows_in(file: Path) -> int | None:
    content = file.read_bytes()
    if file.suffix == ".jsonl":
        return sum(bool(line.strip()) for line in content.splitlines())
    try:
        rows = parse_json(content)
    except ValueError:
        return None
    if isinstance(rows, list):
        return len(rows)
    return None


def processes(draft: PeerSetup) -> int:
    """How many processes the setup starts, by its launcher's words; 1 where they do not say."""
    for word in (
        draft.given.environment.get("NPROC_PER_NODE"),
        draft.get("num_processes"),
        draft.get("nproc_per_node"),
    ):
        if word is not None and str(word).isdigit():
            return int(word)
    return 1


def steps_of_epoch(draft: PeerSetup) -> float | None:
    """Optimizer steps of an epoch, where the rows can be counted."""
    rows = count_rows(draft)
    if rows is None:
        return None
    held_out = float(draft.out.get(f"{BASIC}.val_rate", 0) or 0)

    each = int(draft.out.get("training.micro_batch_size", 1)) * int(
        draft.out.get("training.gradient_accumulation_steps", 1)
    )
    return max(1.0, rows * (1 - held_out) / (each * processes(draft)))


def total_steps(draft: PeerSetup) -> float | None:
    """Optimizer steps of the run, where they are known."""
    if draft.out.get("training.train_iters"):
        return float(draft.out["training.train_iters"])
    epoch = steps_of_epoch(draft)
    if epoch is None:
        return None
    return epoch * float(draft.out.get("training.train_epochs", 1))
