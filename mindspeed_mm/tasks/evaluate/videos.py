"""Videos of a table, scored by VideoAlign's model, and how often its scores say what people say."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.data.data_utils.rows.readers import open_reader
from mindspeed_mm.fsdp.posttrain_rewards.videoalign import VideoScorer

SINGLE, PAIRS, ACCURACY = "reward_out_single.csv", "reward_out_pair.csv", "eval_accuracy.json"
"""Files that are written, called as MindSpeed-MM calls its own."""
OVERALL = "Overall"
_CHOICES = {"A": 1, "B": -1, "same": 0}
_SIDES = ("A", "B")


@dataclass(frozen=True)
class Accuracies:
    """How often scores say what people say of pairs, in one dimension."""

    with_ties: float | None
    """Share of all pairs, where a difference up to a threshold is a tie, at the best threshold (arXiv:2305.14324)."""
    without_ties: float | None
    """Share of the pairs that people call no tie."""


def agreement(choices: Sequence[int], differences: Sequence[float]) -> Accuracies:
    """Compare choices with differences of scores.

    Args:
        choices: 1 where the first of a pair is better, -1 where the second is, 0 for a tie.
        differences: Score of the first minus that of the second.
    """
    if not choices:
        return Accuracies(None, None)
    pairs = list(zip(choices, differences, strict=True))
    best = 0
    for threshold in {abs(difference) for difference in differences}:
        right = 0
        for choice, difference in pairs:
            if abs(difference) <= threshold:
                right += choice == 0
            else:
                right += choice * difference > 0
        best = max(best, right)
    told = [(choice, difference) for choice, difference in pairs if choice]
    without = sum(choice * difference > 0 for choice, difference in told) / len(told) if told else None
    return Accuracies(best / len(pairs), without)


def score_table(scorer: VideoScorer, table: Path, out: Path, attributes: Sequence[str] = ()) -> dict[str, Accuracies]:
    """Score each video of a table once, and write the scores; with `attributes`, compare pairs with people's choices.

    Args:
        scorer: Scores videos.
        table: CSV, JSONL or parquet: rows with `path` and `prompt`, or with `path_A`, `path_B` and `prompt`.
        out: Folder to write to.
        attributes: Dimensions that the rows compare, each a column of A, B and same; others are left out.

    Raises:
        DataError: A row has no video or no prompt, or a video is off.
    """
    reader = open_reader(table)
    rows = [dict(reader.read(number)) for number in range(len(reader))]
    captions: dict[str, str] = {}
    for number, row in enumerate(rows):
        names = [row[key] for key in ("path", "path_A", "path_B") if row.get(key)]
        if not names or not isinstance(row.get("prompt"), str):
            what = "the row has no video or no prompt"
            raise DataError(what, where=str(reader.place(number)), key="path_A", way_out="Repair or drop the row.")
        for name in names:
            captions.setdefault(name, row["prompt"])
    names = sorted(captions)
    found = scorer.scores(names, [captions[name] for name in names])
    scores = {name: {**row, OVERALL: sum(row.values())} for name, row in zip(names, found, strict=True)}
    single = [{"path": n, "prompt": captions[n], **_columns(scores[n])} for n in names]
    atomic_write_text(out / SINGLE, _as_csv(single))
    if not attributes:
        return {}
    atomic_write_text(out / PAIRS, _as_csv(_paired(rows, scores)))
    agreements = {name: _agreement_of(rows, scores, name) for name in attributes}
    told = {f"{name} Accuracy": vars(each) for name, each in agreements.items()}
    atomic_write_text(out / ACCURACY, json.dumps(told, indent=4) + "\n")
    return agreements


def _columns(scores: Mapping[str, float], suffix: str = "") -> dict[str, float]:
    return {f"reward_{name}{suffix}": value for name, value in scores.items()}


def _paired(rows: Iterable[JsonMapping], scores: Mapping[str, Mapping[str, float]]) -> list[JsonObject]:
    """The rows of pairs with the scores of both sides."""
    found = []
    for row in rows:
        beside: dict[str, float] = {}
        for side in _SIDES:
            beside |= _columns(scores[row[f"path_{side}"]], f"_{side}")
        found.append({**row, **beside})
    return found


def _agreement_of(rows: Iterable[JsonMapping], scores: Mapping[str, Mapping[str, float]], name: str) -> Accuracies:
    choices, differences = [], []
    for row in rows:
        if (choice := _CHOICES.get(row.get(name))) is not None:  # type: ignore[arg-type]
            first, second = (scores[row[f"path_{side}"]][name] for side in _SIDES)
            choices.append(choice)
            differences.append(first - second)
    return agreement(choices, differences)


def _as_csv(rows: Sequence[JsonMapping]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
